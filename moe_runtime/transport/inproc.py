"""A link between two threads of one process, for tests: real heads over a socket pair, payloads through a queue."""

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.errors import LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.transport.base import Link, LinkHello
from moe_runtime.transport.channel import ChannelLink, PayloadPlane
from moe_runtime.transport.handshake import LinkOptions, check_agreement
from moe_runtime.transport.raw import copy_in


class PayloadQueue:
    """One direction: payloads that wait for their reader, at most `limit` bytes of them, numbered from 1."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waiting: deque[Tensor] = deque()
        self.used = self.put_count = self.taken_count = 0
        self.closed = False
        self.changed = threading.Condition()


class QueuePlane(PayloadPlane):
    """One end: writes one queue, reads the other."""

    def __init__(self, out: PayloadQueue, back: PayloadQueue, timeout_s: float) -> None:
        self._out, self._in, self._timeout_s = out, back, timeout_s

    def put(self, parts: Sequence[Tensor], size: int) -> int:
        payload = torch.empty(size, dtype=torch.uint8)
        copy_in(payload.data_ptr(), parts, size)
        out, deadline = self._out, time.monotonic() + self._timeout_s
        with out.changed:
            while not out.closed and out.used + size > out.limit:
                if not out.changed.wait(deadline - time.monotonic()):
                    raise LinkTimeoutError(f"the peer took no payload for {self._timeout_s} s and its queue is full")
            if out.closed:
                raise LinkClosedError("the peer closed the link")
            out.waiting.append(payload)
            out.used += size
            out.put_count += 1
            return out.put_count

    def take(self, mark: int, size: int) -> Tensor:
        back = self._in
        with back.changed:
            back.taken_count += 1
            found = back.waiting[0].numel() if back.waiting else 0
            if (mark, size) != (back.taken_count, found):
                raise ProtocolError(
                    f"payload mismatch: the message says number {mark} of {size} bytes, "
                    f"this node has number {back.taken_count} of {found} bytes"
                )
            back.used -= size
            back.changed.notify()
            return back.waiting.popleft()

    def close(self) -> None:
        for queue in (self._out, self._in):
            with queue.changed:
                queue.closed = True
                queue.changed.notify_all()


def link_pair(connecting: LinkOptions, listening: LinkOptions) -> tuple[Link, Link]:
    """The connecting and the listening node's end of a new link. Raises ProtocolError when the two disagree."""
    hellos = [options.hello("inproc", "inproc") for options in (connecting, listening)]
    check_agreement(hellos[1], hellos[0])
    limit = (connecting.exchange.lanes + 1) * connecting.max_payload_bytes
    forth, back = PayloadQueue(limit), PayloadQueue(limit)
    near, far = socket.socketpair()
    return (
        _end(near, QueuePlane(forth, back, connecting.exchange.reply_timeout_s), connecting, hellos[1]),
        _end(far, QueuePlane(back, forth, listening.exchange.reply_timeout_s), listening, hellos[0]),
    )


def _end(sock: socket.socket, plane: QueuePlane, options: LinkOptions, peer: LinkHello) -> Link:
    return ChannelLink(sock, plane, options.terms(peer))
