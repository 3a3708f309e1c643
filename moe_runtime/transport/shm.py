"""Payloads between processes of one host: two single-writer rings in anonymous shared memory, one per direction.

The memory has no name (memfd, else an unlinked file): its descriptor travels over the link's socket, and the kernel
frees it with the last process that maps it, however that process ends.

Layout of a ring: one cache line that holds the reader's counter, then `capacity` bytes. Positions count bytes since the
start and never wrap; position modulo capacity is the place in the ring. A payload never straddles the ring's end.

Capacity: lanes + 1 largest payloads. A lane has one message under way at a time, so at most `lanes` payloads wait in
one direction, and skipping to the ring's start wastes less than one more. Hence a peer that keeps the protocol never
makes a sender wait, and two full rings cannot wait for each other; whoever breaks it meets the link's timeout.
"""

import ctypes
import fcntl
import mmap
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from moe_runtime.errors import LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.protocol.header import ALIGNMENT
from moe_runtime.protocol.payload import aligned
from moe_runtime.transport.channel import PayloadPlane
from moe_runtime.transport.raw import address_of, copy_in, copy_out

_COUNTER_BYTES = ALIGNMENT
_POLL_MS = 1


def ring_capacity(max_payload_bytes: int, lanes: int) -> int:
    return (lanes + 1) * aligned(max_payload_bytes)


def create_memory(capacity: int) -> int:
    """A descriptor of zeroed anonymous memory for two rings; its size is sealed where the system can."""
    size = 2 * (_COUNTER_BYTES + capacity)
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            return os.dup(file.fileno())
    fd = os.memfd_create("moe-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


class RingPlane(PayloadPlane):
    """One end of a link's two rings: `side` 0 created the memory and writes the first, side 1 writes the second."""

    def __init__(self, fd: int, side: int, capacity: int, sock: socket.socket, timeout_s: float) -> None:
        """Maps the memory (the caller still closes fd). Raises ProtocolError when its size is not this node's."""
        size, expected = os.fstat(fd).st_size, 2 * (_COUNTER_BYTES + capacity)
        if size != expected:
            raise ProtocolError(f"shared memory mismatch: the peer offers {size} bytes, this node has {expected}")
        self._memory = mmap.mmap(fd, size)
        rings = [address_of(self._memory) + i * (_COUNTER_BYTES + capacity) for i in range(2)]
        self._taken_by_peer = ctypes.c_uint64.from_address(rings[side])
        self._taken_by_me = ctypes.c_uint64.from_address(rings[1 - side])
        self._out, self._in = rings[side] + _COUNTER_BYTES, rings[1 - side] + _COUNTER_BYTES
        self._capacity = capacity
        self._written = self._free_from = self._read = 0
        self._timeout_s = timeout_s
        self._hangup = select.poll()
        self._hangup.register(sock, getattr(select, "POLLRDHUP", select.POLLHUP))
        self._fence = threading.Lock()
        self._fence.acquire()

    def put(self, parts: Sequence[Tensor], size: int) -> int:
        position = self._place(size)
        copy_in(self._out + position % self._capacity, parts, size)
        self._written = position + size
        return position

    def take(self, mark: int, size: int) -> Tensor:
        place = mark % self._capacity
        # A writer is less than one ring ahead, or two where it started an empty ring over.
        if not self._read <= mark < self._read + 2 * self._capacity or place + size > self._capacity:
            raise ProtocolError(
                f"ring position mismatch: the message says {size} bytes at {mark}, "
                f"this node has read up to {self._read} in a ring of {self._capacity}"
            )
        payload = copy_out(self._in + place, size)
        # Release, then acquire: on every CPU the copy's reads are done before the writer sees the new counter.
        self._fence.release()
        self._fence.acquire()
        self._read = self._taken_by_me.value = mark + size
        return payload

    def close(self) -> None:
        self._memory.close()

    def _place(self, size: int) -> int:
        """Where `size` bytes go next. An empty ring starts over: its first pages are warm in the cache."""
        written, capacity = self._written, self._capacity
        offset = written % capacity
        start = written + capacity - offset if offset else written
        if self._taken() == written:
            self._free_from = start
            return start
        if offset + size <= capacity:
            start = written
        if start + size - self._taken() > capacity:
            self._wait_until_taken(start + size - capacity)
        return start

    def _taken(self) -> int:
        """Everything below this position may be overwritten."""
        return max(self._taken_by_peer.value, self._free_from)

    def _wait_until_taken(self, position: int) -> None:
        """Sleep in steps, and notice at once when the peer hangs up."""
        deadline = time.monotonic() + self._timeout_s
        while self._taken() < position:
            if self._hangup.poll(_POLL_MS):
                raise LinkClosedError("the peer is gone and its ring is full")
            if time.monotonic() > deadline:
                raise LinkTimeoutError(f"the peer took no payload for {self._timeout_s} s and its ring is full")


def send_with_memory(sock: socket.socket, data: bytes, fd: int) -> None:
    """Send all bytes, the descriptor with the first of them."""
    rest = data[socket.send_fds(sock, [data], [fd]) :]
    # The peer may have answered and hung up already: then even an empty send would fail.
    if rest:
        sock.sendall(rest)


def receive_with_memory(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Up to `size` bytes and the descriptors that came with them (the caller closes those)."""
    data, fds, _, _ = socket.recv_fds(sock, size, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    return data, fds
