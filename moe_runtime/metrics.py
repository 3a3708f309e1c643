"""Counters and gauges of one process: bound once, cheap to change, read as protocol samples.

    steps = metrics.counter("steps_total", {"lane": "0"})   # at start-up
    steps.add()                                             # on the hot path: one addition

There is no global registry: a node makes one Metrics and hands it to its parts. Handles belong to one thread.
"""

import re
from collections.abc import Mapping

from moe_runtime.protocol.control import Sample

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Counter:
    """A sum that only grows; names end in `_total`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Gauge:
    """A value of this moment."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value


class Metrics:
    """A node's registry; asking twice for the same name and labels gives the same handle."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, tuple[tuple[str, str], ...]], Counter] = {}
        self._gauges: dict[tuple[str, tuple[tuple[str, str], ...]], Gauge] = {}

    def counter(self, name: str, labels: Mapping[str, str] | None = None) -> Counter:
        """The handle of a counter. Raises ValueError on a name that Prometheus refuses or that lacks `_total`."""
        if not name.endswith("_total"):
            raise ValueError(f"counter {name!r}: expected a name that ends in _total")
        return self._counters.setdefault(_key(name, labels), Counter())

    def gauge(self, name: str, labels: Mapping[str, str] | None = None) -> Gauge:
        """The handle of a gauge. Raises ValueError on a name that Prometheus refuses or that ends in `_total`."""
        if name.endswith("_total"):
            raise ValueError(f"gauge {name!r}: names that end in _total are counters'")
        return self._gauges.setdefault(_key(name, labels), Gauge())

    def snapshot(self) -> tuple[Sample, ...]:
        """Every metric's current value, counters first, in the order in which they were asked for."""
        counters = (Sample(name, "counter", c.value, dict(labels)) for (name, labels), c in self._counters.items())
        gauges = (Sample(name, "gauge", g.value, dict(labels)) for (name, labels), g in self._gauges.items())
        return (*counters, *gauges)


def _key(name: str, labels: Mapping[str, str] | None) -> tuple[str, tuple[tuple[str, str], ...]]:
    for word in (name, *(labels or {})):
        if not _NAME.fullmatch(word):
            raise ValueError(f"metric or label name {word!r}: expected lower-case letters, digits and underscores")
    return name, tuple(sorted((labels or {}).items()))
