"""One connection that a listener is still shaking hands with."""

import contextlib
import os
import socket

import msgspec

from moe_runtime.errors import ProtocolError
from moe_runtime.transport.base import LinkHello
from moe_runtime.transport.handshake import LENGTH, Answer, LinkOptions, decode_hello, encode_message, message_length
from moe_runtime.transport.shm import RingPlane, receive_with_memory, ring_capacity


class Greeting:
    """A connection whose hello is not complete yet."""

    def __init__(self, sock: socket.socket, unix: bool, deadline: float) -> None:
        self.sock, self.unix, self.deadline = sock, unix, deadline
        self._data = b""
        self._memory: list[int] = []

    def hear(self) -> LinkHello | None:
        """Read what is there. Raises ProtocolError for anything that is no hello, OSError when the peer is gone."""
        while True:
            wanted = LENGTH.size
            if len(self._data) >= LENGTH.size:
                wanted += message_length(self._data[: LENGTH.size])
                if len(self._data) == wanted:
                    return self._decode()
            try:
                data, memory = receive_with_memory(self.sock, wanted - len(self._data))
            except BlockingIOError:
                return None
            self._memory += memory
            if not data:
                raise ConnectionError("end of stream")
            self._data += data

    def map_memory(self, options: LinkOptions) -> RingPlane:
        """The rings whose descriptor came with the hello. Raises ProtocolError when it is missing or unfit."""
        if len(self._memory) != 1:
            raise ProtocolError(f"shm link: the hello came with {len(self._memory)} descriptors, expected 1")
        capacity = ring_capacity(options.max_payload_bytes, options.exchange.lanes)
        plane = RingPlane(self._memory[0], 1, capacity, self.sock, options.exchange.reply_timeout_s)
        self._close_memory()
        return plane

    def refuse(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(encode_message(Answer(refusal=reason)))

    def close(self) -> None:
        self._close_memory()
        self.sock.close()

    def _close_memory(self) -> None:
        while self._memory:
            os.close(self._memory.pop())

    def _decode(self) -> LinkHello:
        try:
            return decode_hello(self._data[LENGTH.size :])
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the first message is no link hello: {error}") from error
