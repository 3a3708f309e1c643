"""Payloads between hosts: one packed uint8 tensor a frame over a two-rank process group of torch.distributed.

Each link builds groups of its own, directly over the store and under its unique id: no global rendezvous, a rejoining
node never meets an old key, and one dead peer harms one link. Rank 0 is the connecting side.
"""

import contextlib
import select
import socket
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from moe_runtime.errors import LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.protocol.payload import pack_into, payload_size
from moe_runtime.transport.channel import PayloadPlane
from moe_runtime.transport.handshake import LinkOptions
from moe_runtime.transport.raw import copy_in

_TAG_MASK = 0x7FFFFFFF
_POLL_S = 0.0005
# Work.wait counts whole milliseconds and takes 0 for the group's default.
_SHORTEST_WAIT_S = 0.001


class Group(Protocol):
    """The part of a torch.distributed backend that a link uses (torch's type stubs leave it out)."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work: ...

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...


class GroupPlane(PayloadPlane):
    """What gloo and NCCL share: marks count the frames of one direction, a receive is posted when its head has arrived.

    Sends run on their own; at most lanes + 1 are under way (a shared-memory ring's bound), each with its tensor.
    """

    def __init__(self, out: Group, back: Group, sock: socket.socket, options: LinkOptions, rank: int) -> None:
        self._out, self._in, self._sock = out, back, sock
        self._peer_rank = 1 - rank
        self._limit = options.exchange.lanes + 1
        self._timeout_s, self._close_timeout_s = options.exchange.reply_timeout_s, options.exchange.close_timeout_s
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent = self._received = 0

    def put(self, parts: Sequence[Tensor], size: int) -> int:
        if len(self._sending) >= self._limit:
            self._finish_oldest(self._timeout_s)
        packed = self._pack(parts, size)
        self._sent += 1
        with _as_closed():
            self._sending.append((self._out.send([packed], self._peer_rank, self._sent & _TAG_MASK), packed))
        return self._sent

    def take(self, mark: int, size: int) -> Tensor:
        self._received += 1
        if mark != self._received:
            raise ProtocolError(f"frame number mismatch: the message says {mark}, this node has {self._received}")
        payload = self._empty(size)
        with _as_closed():
            work = self._in.recv([payload], self._peer_rank, mark & _TAG_MASK)
        self._wait_received(work)
        return payload

    def close(self) -> None:
        """Let frames that are under way arrive, unless the peer is closing too or the close timeout has passed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + self._close_timeout_s
        with contextlib.suppress(LinkClosedError, LinkTimeoutError):
            while self._sending and not _hung_up(self._sock):
                self._finish_oldest(deadline - time.monotonic())
        # A receive from a dead peer may be stuck, too.
        self._release(finished=not self._sending and not _hung_up(self._sock))
        self._sending.clear()
        del self._out, self._in

    @abstractmethod
    def _pack(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """The parts in one new tensor. Raises ValueError when they do not take `size` bytes."""

    @abstractmethod
    def _empty(self, size: int) -> Tensor: ...

    @abstractmethod
    def _wait_received(self, work: dist.Work) -> None: ...

    @abstractmethod
    def _finish_oldest(self, timeout_s: float) -> None:
        """Wait until the first send is done and forget it. Raises LinkTimeoutError, LinkClosedError."""

    @abstractmethod
    def _release(self, finished: bool) -> None: ...


class GlooPlane(GroupPlane):
    """CPU tensors. A wait that times out ends the whole group, so that the link is to be closed."""

    def _pack(self, parts: Sequence[Tensor], size: int) -> Tensor:
        packed = self._empty(size)
        copy_in(packed.data_ptr(), parts, size)
        return packed

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def _wait_received(self, work: dist.Work) -> None:
        _wait(work, self._timeout_s, "sent no payload")

    def _finish_oldest(self, timeout_s: float) -> None:
        _wait(self._sending[0][0], timeout_s, "took no payload")
        self._sending.popleft()

    def _release(self, finished: bool) -> None:
        """Nothing to do: a group closes its connections with its last reference."""


class NcclPlane(GroupPlane):
    """CUDA tensors, ordered on the current stream. One group per direction: on one, two crossing sends would hang."""

    def _pack(self, parts: Sequence[Tensor], size: int) -> Tensor:
        if payload_size(parts) != size:
            raise ValueError(f"the header announces {size} payload bytes, the parts take {payload_size(parts)}")
        packed = self._empty(size)
        pack_into(packed, parts)
        return packed

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def _wait_received(self, work: dist.Work) -> None:
        with _as_closed():
            work.wait()

    def _finish_oldest(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with _as_closed():
            while not self._sending[0][0].is_completed():
                if _hung_up(self._sock):
                    raise LinkClosedError("the peer is gone with payloads under way")
                if time.monotonic() > deadline:
                    raise LinkTimeoutError(f"the peer took no payload for {timeout_s} s")
                time.sleep(_POLL_S)
        self._sending.popleft()

    def _release(self, finished: bool) -> None:
        for group in (self._out, self._in):
            with contextlib.suppress(RuntimeError):
                if finished:
                    group.shutdown()
                else:
                    group.abort()


def build_plane(sock: socket.socket, rank: int, link_id: str, transport: str, options: LinkOptions) -> GroupPlane:
    """Meet the peer at the store and connect. Blocks until both are there.

    Raises LinkClosedError when that fails or takes longer than exchange.rendezvous_timeout_s.
    """
    timeout = timedelta(seconds=options.exchange.rendezvous_timeout_s)
    try:
        store = TCPStore(options.store_host, options.store_port, is_master=False, timeout=timeout)
        prefix = f"link/{link_id}"
        if transport == "gloo":
            group = _gloo_group(PrefixStore(prefix, store), rank, sock.getsockname()[0], timeout)
            return GlooPlane(group, group, sock, options, rank)
        pair = [_nccl_group(PrefixStore(f"{prefix}/{i}", store), rank, timeout) for i in range(2)]
        _warm_up(pair, rank)
        return NcclPlane(pair[rank], pair[1 - rank], sock, options, rank)
    except RuntimeError as error:
        place = f"{options.store_host}:{options.store_port}"
        raise LinkClosedError(f"no {transport} link over the store at {place}: {error}") from error


def _gloo_group(store: Store, rank: int, host: str, timeout: timedelta) -> Group:
    """A group that listens on the address which the link's socket uses, whatever the hostname resolves to."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timeout
    return cast(Group, dist.ProcessGroupGloo(store, rank, 2, options))


def _nccl_group(store: Store, rank: int, timeout: timedelta) -> Group:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(Group, dist.ProcessGroupNCCL(store, rank, 2, options))


def _warm_up(pair: Sequence[Group], rank: int) -> None:
    """NCCL makes a communicator at the first message, blocking both sides: do it now, one direction at a time."""
    byte = torch.zeros(1, dtype=torch.uint8, device="cuda")
    for sender, group in enumerate(pair):
        work = group.send([byte], 1 - rank, 0) if rank == sender else group.recv([byte], 1 - rank, 0)
        work.wait()
    torch.cuda.synchronize()


def _wait(work: dist.Work, timeout_s: float, what: str) -> None:
    timeout_s = max(timeout_s, _SHORTEST_WAIT_S)
    deadline = time.monotonic() + timeout_s
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if time.monotonic() >= deadline:
            raise LinkTimeoutError(f"the peer {what} for {timeout_s} s") from error
        raise LinkClosedError(f"the peer is gone: {error}") from error


@contextlib.contextmanager
def _as_closed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LinkClosedError(f"the peer is gone: {error}") from error


def _hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, getattr(select, "POLLRDHUP", select.POLLHUP))
    return bool(poller.poll(0))
