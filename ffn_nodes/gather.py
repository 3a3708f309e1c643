"""Which queued messages does a free FFN node serve next? Policies over one queue; all but lockstep merge everything
queued for the chosen layer into one call.

laggard_first: the layer that holds the lane with the least progress (the virtual clock in the header), which brings
lanes back into phase without a barrier. oldest_first: the layer of the message that came first. window: oldest_first,
but not before that message is gather_window_us old. lockstep: all lanes seen of late must have a message here before
one is served (bounded by _LOCKSTEP_WAIT, so that an idle lane stops nobody); for comparison.

Nothing here reads a clock: times are arguments, in seconds.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from moe_runtime.protocol.payload import Frame
from moe_runtime.transport.base import Link

_LOCKSTEP_WAIT = 0.02


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message in the queue, and the link that wants the answer."""

    frame: Frame
    link: Link
    at: float

    @property
    def lane(self) -> tuple[int, int]:
        return self.frame.header.sender, self.frame.header.lane


class GatherQueue:
    """Messages by layer, in order of arrival."""

    def __init__(self, policy: str, window_us: int) -> None:
        choosers: dict[str, Callable[[float], int | None]] = {
            "laggard_first": self._laggard,
            "oldest_first": self._oldest,
            "window": self._windowed,
            "lockstep": self._lockstep,
        }
        if policy not in choosers:
            raise ValueError(f"unknown gather policy {policy!r}; known: {', '.join(choosers)}")
        self._choose = choosers[policy]
        self._patience = {"window": window_us / 1e6, "lockstep": _LOCKSTEP_WAIT}.get(policy, 0.0)
        self._by_layer: OrderedDict[int, list[Arrival]] = OrderedDict()
        self._last_seen: dict[tuple[int, int], float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_layer.values()))

    def add(self, arrival: Arrival) -> None:
        self._last_seen[arrival.lane] = arrival.at
        self._by_layer.setdefault(arrival.frame.header.layer, []).append(arrival)

    def take(self, now: float) -> list[Arrival]:
        """The messages to serve now, all of one layer; empty when there is none or the policy waits."""
        layer = self._choose(now) if self._by_layer else None
        return [] if layer is None else self._by_layer.pop(layer)

    def drop(self, link: Link) -> None:
        """Forget what a dead link asked for, and wait for its lanes no more."""
        self._last_seen = {lane: at for lane, at in self._last_seen.items() if lane[0] != link.peer_index}
        for layer in list(self._by_layer):
            kept = [arrival for arrival in self._by_layer[layer] if arrival.link is not link]
            if kept:
                self._by_layer[layer] = kept
            else:
                del self._by_layer[layer]

    def wait_s(self, now: float) -> float | None:
        """How long take() may stay empty at most without a new message; None when nothing is queued."""
        if not self._by_layer:
            return None
        return max(0.0, self._oldest_at() + self._patience - now)

    def clock_floor(self) -> int | None:
        """Least progress among queued lanes."""
        clocks = [a.frame.header.clock for group in self._by_layer.values() for a in group]
        return min(clocks, default=None)

    def _laggard(self, _now: float) -> int:
        return min(self._by_layer, key=lambda layer: min(a.frame.header.clock for a in self._by_layer[layer]))

    def _oldest(self, _now: float) -> int:
        return min(self._by_layer, key=lambda layer: self._by_layer[layer][0].at)

    def _windowed(self, now: float) -> int | None:
        return self._oldest(now) if now - self._oldest_at() >= self._patience else None

    def _lockstep(self, now: float) -> int | None:
        queued = {a.lane for group in self._by_layer.values() for a in group}
        awaited = {lane for lane, at in self._last_seen.items() if now - at < _LOCKSTEP_WAIT}
        if awaited <= queued or now - self._oldest_at() >= self._patience:
            return self._laggard(now)
        return None

    def _oldest_at(self) -> float:
        return min(group[0].at for group in self._by_layer.values())
