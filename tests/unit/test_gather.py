"""Which layer a free FFN node serves next, policy by policy, on a clock that the test owns (seconds)."""

import heapq
from types import SimpleNamespace

import pytest
import torch

from ffn_nodes.gather import Arrival, GatherQueue
from moe_runtime.protocol.header import Header, Kind, PayloadType
from moe_runtime.protocol.payload import Frame

WINDOW_US = 300
POLICIES = ("laggard_first", "oldest_first", "window", "lockstep")


def arrival(sender: int, layer: int, clock: int, at: float, lane: int = 0) -> Arrival:
    header = Header(Kind.DISPATCH, PayloadType.FLOAT32, sender, lane, layer, 0, 0, 1, 4, 1, 0, clock, 0)
    link = LINKS.setdefault(sender, SimpleNamespace(peer_index=sender))
    return Arrival(Frame(header, torch.empty(0)), link, at)


LINKS: dict[int, SimpleNamespace] = {}


def queue_of(policy: str, *arrivals: Arrival) -> GatherQueue:
    queue = GatherQueue(policy, WINDOW_US)
    for one in arrivals:
        queue.add(one)
    return queue


def senders(group: list[Arrival]) -> list[int]:
    return [one.frame.header.sender for one in group]


def three_layers(policy: str) -> GatherQueue:
    """Layer 4 came first, layer 2 holds the lane with the least progress, layer 7 has the most messages."""
    return queue_of(
        policy,
        arrival(0, layer=4, clock=14, at=1.0),
        arrival(1, layer=7, clock=17, at=1.0001),
        arrival(2, layer=2, clock=12, at=1.0002),
        arrival(3, layer=7, clock=27, at=1.0002),
        arrival(4, layer=7, clock=37, at=1.0002),
        arrival(5, layer=2, clock=92, at=1.0002),
    )


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("laggard_first", [[2, 5], [0], [1, 3, 4]]),
        ("oldest_first", [[0], [1, 3, 4], [2, 5]]),
        ("window", [[0], [1, 3, 4], [2, 5]]),
        ("lockstep", [[2, 5], [0], [1, 3, 4]]),
    ],
)
def test_each_policy_serves_whole_layers_in_its_own_order(policy: str, order: list[list[int]]) -> None:
    queue = three_layers(policy)
    assert len(queue) == 6
    late = 1.1  # past every window
    assert [senders(queue.take(late)) for _ in order] == order
    assert queue.take(late) == [] and len(queue) == 0 and queue.wait_s(late) is None


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown gather policy 'fastest'; known: laggard_first, oldest_first"):
        GatherQueue("fastest", 0)


@pytest.mark.parametrize("policy", ["laggard_first", "oldest_first"])
def test_a_policy_that_never_waits_asks_for_no_waiting(policy: str) -> None:
    queue = queue_of(policy, arrival(0, layer=1, clock=1, at=1.0))
    assert queue.wait_s(1.0) == 0.0
    assert senders(queue.take(1.0)) == [0]


def test_window_holds_a_layer_back_until_its_first_message_is_old_enough() -> None:
    queue = queue_of("window", arrival(0, layer=1, clock=1, at=1.0))
    assert queue.take(1.0002) == []
    assert queue.wait_s(1.0002) == pytest.approx(0.0001)
    queue.add(arrival(1, layer=1, clock=5, at=1.0002))
    assert senders(queue.take(1.0 + 1.01 * WINDOW_US / 1e6)) == [0, 1]


def test_lockstep_waits_for_every_lane_seen_of_late() -> None:
    queue = queue_of("lockstep", arrival(0, layer=1, clock=1, at=1.0), arrival(1, layer=1, clock=1, at=1.0))
    queue.add(arrival(1, layer=1, clock=1, at=1.0, lane=1))
    assert senders(queue.take(1.0)) == [0, 1, 1]
    queue.add(arrival(0, layer=2, clock=2, at=1.001))
    assert queue.take(1.001) == []
    queue.add(arrival(1, layer=2, clock=2, at=1.002))
    assert queue.take(1.002) == [], "lane 1 of node 1 is still missing"
    queue.add(arrival(1, layer=2, clock=2, at=1.003, lane=1))
    assert senders(queue.take(1.003)) == [0, 1, 1]


def test_lockstep_waits_a_bounded_time_for_a_lane_that_went_idle() -> None:
    queue = queue_of("lockstep", arrival(0, layer=1, clock=1, at=1.0), arrival(1, layer=1, clock=1, at=1.0))
    assert senders(queue.take(1.0)) == [0, 1]
    queue.add(arrival(0, layer=2, clock=2, at=1.001))
    wait = queue.wait_s(1.001)
    assert wait is not None and 0 < wait < 0.1
    assert queue.take(1.001) == []
    assert senders(queue.take(1.001 + wait + 1e-9)) == [0]
    # From then on nobody waits for it.
    queue.add(arrival(0, layer=3, clock=3, at=1.03))
    assert senders(queue.take(1.03)) == [0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dropped_link_is_forgotten_and_the_rest_is_served(policy: str) -> None:
    queue = three_layers(policy)
    queue.drop(LINKS[2])
    queue.drop(LINKS[0])
    assert len(queue) == 4 and queue.clock_floor() == 17
    served = [senders(queue.take(1.1)) for _ in range(2)]
    assert sorted(served) == [[1, 3, 4], [5]]
    assert queue.take(1.1) == []


def test_lockstep_does_not_wait_for_a_dropped_link() -> None:
    queue = queue_of("lockstep", arrival(0, layer=1, clock=1, at=1.0), arrival(1, layer=1, clock=1, at=1.0))
    queue.take(1.0)
    queue.drop(LINKS[1])
    queue.add(arrival(0, layer=2, clock=2, at=1.001))
    assert senders(queue.take(1.001)) == [0]


def test_clock_floor_is_the_least_progress_queued() -> None:
    assert GatherQueue("laggard_first", 0).clock_floor() is None
    assert three_layers("laggard_first").clock_floor() == 12


def simulate(policy: str, lanes: int, layers: int = 8, calls: int = 1200) -> tuple[list[int], list[int]]:
    """Lanes that start a third of a millisecond apart: how many messages each call merged, and how far apart the lanes
    were. 25 us of attention a layer, 80 us a call and 10 us a message.
    """
    queue, clocks = GatherQueue(policy, WINDOW_US), [0] * lanes
    events = [(333 * lane, "message", lane) for lane in range(lanes)]
    running: list[Arrival] = []
    merged, spreads = [], []
    while len(merged) < calls:
        now, kind, lane = heapq.heappop(events)
        if kind == "message":
            queue.add(arrival(lane, clocks[lane] % layers, clocks[lane], now / 1e6))
        elif kind == "served":
            for one in running:
                clocks[one.frame.header.sender] += 1
                heapq.heappush(events, (now + 25, "message", one.frame.header.sender))
            running = []
        if not running and not (events and events[0][0] == now):
            running = queue.take(now / 1e6)
            if running:
                heapq.heappush(events, (now + 80 + 10 * len(running), "served", 0))
                merged.append(len(running))
                spreads.append(max(clocks) - min(clocks))
    return merged, spreads


@pytest.mark.parametrize("lanes", [4, 8])
def test_laggard_first_brings_lanes_into_two_phases(lanes: int) -> None:
    """Two calls serve all lanes of a layer, one part computing attention while the other is served; oldest_first
    leaves them scattered.
    """
    merged, spreads = simulate("laggard_first", lanes)
    assert sum(merged[:20]) < 20 * lanes / 3
    assert sum(merged[-200:]) == 200 * lanes / 2
    assert max(spreads[-200:]) <= 2
    scattered, _ = simulate("oldest_first", lanes)
    assert sum(scattered[-200:]) < 0.8 * sum(merged[-200:])
