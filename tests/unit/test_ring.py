"""The shared-memory ring: its capacity holds and is tight, payloads are the reader's own, bad marks are refused."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.errors import LinkTimeoutError, ProtocolError
from moe_runtime.protocol.payload import aligned
from moe_runtime.transport.shm import RingPlane, create_memory, ring_capacity

LARGEST = 1000


@contextmanager
def ring_ends(capacity: int) -> Iterator[tuple[RingPlane, RingPlane]]:
    """Both ends in one process; a put() that would have to wait fails at once."""
    memory, sockets = create_memory(capacity), socket.socketpair()
    ends = [RingPlane(memory, side, capacity, sock, timeout_s=1e-9) for side, sock in enumerate(sockets)]
    os.close(memory)
    try:
        yield ends[0], ends[1]
    finally:
        for closing in (*ends, *sockets):
            closing.close()


def run(ends: tuple[RingPlane, RingPlane], lanes: int, script: list[tuple[int, bool]]) -> list[tuple[Tensor, Tensor]]:
    """Write payloads of the given sizes with at most `lanes` unread; True reads one first. Pairs (read, written)."""
    waiting: list[tuple[int, Tensor]] = []
    pairs = []
    for i, (size, read_first) in enumerate([*script, *[(0, True)] * lanes]):
        if waiting and (read_first or len(waiting) == lanes):
            mark, data = waiting.pop(0)
            pairs.append((ends[1].take(mark, aligned(data.numel()))[: data.numel()], data))
        if size:
            data = torch.full((size,), i % 251, dtype=torch.uint8)
            waiting.append((ends[0].put([data], aligned(size)), data))
    return pairs


def tight(lanes: int) -> list[tuple[int, bool]]:
    """A small payload, then large ones: the ring's end comes when all but one of them wait."""
    return [(1, False)] + [(LARGEST, False)] * 4 * lanes


sizes = st.one_of(st.integers(1, LARGEST), st.sampled_from([1, LARGEST]))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(sizes, st.booleans()), max_size=60))
@example(2, tight(2))
@example(4, tight(4))
def test_lanes_plus_one_never_fills(lanes: int, script: list[tuple[int, bool]]) -> None:
    with ring_ends(ring_capacity(LARGEST, lanes)) as ends:
        pairs = run(ends, lanes, script)
    assert len(pairs) == len(script)
    assert all(torch.equal(read, written) for read, written in pairs)


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_lanes_would_fill(lanes: int) -> None:
    with ring_ends(ring_capacity(LARGEST, lanes) - aligned(LARGEST)) as ends, pytest.raises(LinkTimeoutError):
        run(ends, lanes, tight(lanes))


def test_directions_do_not_touch() -> None:
    with ring_ends(ring_capacity(LARGEST, 1)) as (near, far):
        forth, back = torch.full((LARGEST,), 1, dtype=torch.uint8), torch.full((LARGEST,), 2, dtype=torch.uint8)
        marks = near.put([forth], aligned(LARGEST)), far.put([back], aligned(LARGEST))
        assert torch.equal(near.take(marks[1], aligned(LARGEST))[:LARGEST], back)
        assert torch.equal(far.take(marks[0], aligned(LARGEST))[:LARGEST], forth)


def test_an_empty_ring_starts_over() -> None:
    """Ping-pong stays on the same warm bytes."""
    capacity = ring_capacity(LARGEST, 2)
    with ring_ends(capacity) as (near, far):
        places = set()
        for _ in range(5):
            mark = near.put([torch.zeros(100, dtype=torch.uint8)], 128)
            places.add(mark % capacity)
            far.take(mark, 128)
    assert places == {0}


@pytest.mark.parametrize("mark", [0, 64, 5 * aligned(LARGEST) + 64, 1 << 40])
def test_bad_marks(mark: int) -> None:
    with ring_ends(2 * aligned(LARGEST)) as (near, far):
        far.take(near.put([torch.zeros(128, dtype=torch.uint8)], 128), 128)
        with pytest.raises(ProtocolError, match=f"at {mark}, .* up to 128 in a ring of 2048"):
            far.take(mark, 64)


def test_a_payload_never_crosses_the_end() -> None:
    with ring_ends(2 * aligned(LARGEST)) as (_, far), pytest.raises(ProtocolError):
        far.take(2 * aligned(LARGEST) - 64, 128)


def test_memory_of_another_size_is_refused() -> None:
    memory, sockets = create_memory(1024), socket.socketpair()
    with pytest.raises(ProtocolError, match="offers 2176 bytes, this node has 4224"):
        RingPlane(memory, 1, 2048, sockets[0], 1.0)
    os.close(memory)
    for sock in sockets:
        sock.close()


def test_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with ring_ends(ring_capacity(LARGEST, 1)) as ends:
        assert len(run(ends, 1, [(LARGEST, False)] * 3)) == 3
