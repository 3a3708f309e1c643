"""The link that every transport shares: frame heads on a stream socket, payloads on a plane of the transport's own.

On the socket a frame is one fixed-size head: the plane's mark (where the payload is) and the protocol header. A
receiver reads exactly one head at a time, so that a level-triggered poll stays right while several frames are queued.
"""

import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.errors import LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.protocol.header import HEADER_BYTES, Header, unpack
from moe_runtime.protocol.payload import Frame
from moe_runtime.transport.base import Link

_MARK = struct.Struct("<Q")
HEAD_BYTES = _MARK.size + HEADER_BYTES


class PayloadPlane(ABC):
    """Moves payloads of at least one byte for one link, in order and in both directions."""

    @abstractmethod
    def put(self, parts: Sequence[Tensor], size: int) -> int:
        """Take a copy of the parts; the result is the mark that travels in the frame's head.

        Raises LinkClosedError, LinkTimeoutError (no room in time), ValueError (the parts do not take `size` bytes).
        """

    @abstractmethod
    def take(self, mark: int, size: int) -> Tensor:
        """The payload, uint8 [size], of the head that was just read.

        Raises LinkClosedError, LinkTimeoutError, ProtocolError (the mark is not what comes next).
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; called once."""


@dataclass(frozen=True)
class LinkTerms:
    """What a link needs to know: who is at the other end, and its bounds."""

    peer: str
    peer_index: int
    transport: str
    max_payload_bytes: int
    timeout_s: float


class ChannelLink(Link):
    """A Link over a connected stream socket and a payload plane."""

    def __init__(self, sock: socket.socket, plane: PayloadPlane, terms: LinkTerms) -> None:
        sock.setblocking(False)
        self.peer, self.peer_index, self.transport = terms.peer, terms.peer_index, terms.transport
        self._sock, self._plane, self._terms = sock, plane, terms
        self._begun = b""
        self._closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, header: Header, parts: Sequence[Tensor]) -> None:
        size = header.payload_bytes
        if size > self._terms.max_payload_bytes:
            raise ValueError(f"payload of {size} bytes exceeds the link's {self._terms.max_payload_bytes}")
        if self._closed:
            raise LinkClosedError(f"the link to {self.peer} was closed on this side")
        mark = self._plane.put(parts, size) if size else 0
        head = _MARK.pack(mark) + header.pack()
        try:
            sent = self._sock.send(head)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._gone(error) from error
        if sent < HEAD_BYTES:
            self._send_rest(head[sent:])

    def receive(self) -> Frame | None:
        try:
            data = self._sock.recv(HEAD_BYTES - len(self._begun))
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._gone(error) from error
        if not data:
            raise self._gone("end of stream")
        data = self._begun + data
        if len(data) < HEAD_BYTES:
            self._begun = data
            return None
        self._begun = b""
        header = unpack(memoryview(data)[_MARK.size :])
        return Frame(header, self._payload(_MARK.unpack_from(data)[0], header.payload_bytes))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._plane.close()
            self._sock.close()

    def _payload(self, mark: int, size: int) -> Tensor:
        if size > self._terms.max_payload_bytes:
            limit = self._terms.max_payload_bytes
            raise ProtocolError(f"{self.peer} announces a payload of {size} bytes, this link takes at most {limit}")
        return self._plane.take(mark, size) if size else torch.empty(0, dtype=torch.uint8)

    def _send_rest(self, rest: bytes) -> None:
        """Wait for a socket that is full. Half a head cannot be taken back, so a timeout closes the link."""
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        deadline = time.monotonic() + self._terms.timeout_s
        while rest:
            left = deadline - time.monotonic()
            if left <= 0:
                self.close()
                raise LinkTimeoutError(f"{self.peer} took no message for {self._terms.timeout_s} s")
            poller.poll(left * 1000)
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._gone(error) from error

    def _gone(self, reason: object) -> LinkClosedError:
        return LinkClosedError(f"the {self.transport} link to {self.peer} is closed: {reason}")
