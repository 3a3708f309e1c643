"""The metrics registry: shared handles, plain samples, refused names."""

import pytest

from moe_runtime.metrics import Metrics
from moe_runtime.protocol.control import Sample


def test_handles_are_shared_and_read_as_samples() -> None:
    metrics = Metrics()
    steps = metrics.counter("steps_total", {"lane": "0"})
    steps.add()
    metrics.counter("steps_total", {"lane": "0"}).add(2.5)
    metrics.counter("steps_total", {"lane": "1"})
    metrics.gauge("queue").set(4)
    assert metrics.snapshot() == (
        Sample("steps_total", "counter", 3.5, {"lane": "0"}),
        Sample("steps_total", "counter", 0.0, {"lane": "1"}),
        Sample("queue", "gauge", 4, {}),
    )


def test_label_order_does_not_matter() -> None:
    metrics = Metrics()
    assert metrics.gauge("x", {"a": "1", "b": "2"}) is metrics.gauge("x", {"b": "2", "a": "1"})


def test_registries_share_nothing() -> None:
    Metrics().counter("steps_total").add()
    assert Metrics().snapshot() == ()


@pytest.mark.parametrize("name", ["Steps_total", "a-b_total", "", "steps"])
def test_names_prometheus_would_refuse(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Metrics().counter(name)


def test_a_gauge_is_no_counter() -> None:
    with pytest.raises(ValueError, match="counters'"):
        Metrics().gauge("steps_total")
    with pytest.raises(ValueError, match="label name"):
        Metrics().gauge("queue", {"le-ft": "1"})
