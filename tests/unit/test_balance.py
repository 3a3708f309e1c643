"""Requests go where the fewest tokens are outstanding, and the books balance."""

import random

from moe_runtime.gateway.balance import Balancer

ALIVE = {"a": True, "b": True, "c": True}


def test_an_initial_burst_spreads() -> None:
    balancer = Balancer(dict.fromkeys("abc", 1000))
    nodes = [balancer.place(str(index), 10, 10, ALIVE) for index in range(9)]
    assert sorted(node for node in nodes if node) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_a_long_request_weighs_more_than_short_ones() -> None:
    balancer = Balancer(dict.fromkeys("ab", 1000))
    assert balancer.place("long", 500, 100, ALIVE) == "a"
    assert [balancer.place(f"short{index}", 50, 50, ALIVE) for index in range(5)] == ["b"] * 5


def test_progress_counts() -> None:
    balancer = Balancer(dict.fromkeys("ab", 1000))
    balancer.place("first", 100, 10, ALIVE)
    balancer.place("second", 60, 10, ALIVE)
    balancer.produced("first", 1)
    assert balancer.outstanding == {"a": 9, "b": 70}
    assert balancer.place("third", 1, 1, ALIVE) == "a"


def test_dead_and_small_nodes_are_passed_over() -> None:
    balancer = Balancer({"a": 50, "b": 100, "c": 1000})
    assert balancer.place("big", 60, 20, ALIVE) == "b"
    assert balancer.place("bigger", 60, 60, ALIVE) == "c"
    assert balancer.place("refused", 60, 60, {**ALIVE, "c": False}) is None
    assert balancer.requests_of("b") == ["big"]


def test_nothing_is_left_when_all_have_ended() -> None:
    rng = random.Random(0)
    balancer = Balancer(dict.fromkeys("abc", 1000))
    open_requests: list[str] = []
    for index in range(500):
        if open_requests and rng.random() < 0.5:
            balancer.release(open_requests.pop(rng.randrange(len(open_requests))))
        else:
            balancer.place(str(index), rng.randint(1, 100), rng.randint(1, 100), ALIVE)
            open_requests.append(str(index))
            balancer.produced(str(index), rng.randint(0, 120))
    for request_id in open_requests:
        balancer.release(request_id)
    assert set(balancer.outstanding.values()) == {0}
