"""HTTP by hand, for what no client library would send."""

import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 30


@dataclass(frozen=True)
class RawAnswer:
    """One answer; headers by their lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which must have its one form."""
        assert self.headers["content-type"] == "application/json", self
        content = json.loads(self.body)
        assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
        assert content["error"]["message"]
        return content["error"]


class Connection:
    """One TCP connection to the server at `url`."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.socket = socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S)
        self._buffer = b""

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes | str) -> None:
        self.socket.sendall(data.encode("latin-1") if isinstance(data, str) else data)

    def answer(self) -> RawAnswer:
        """The next answer with a Content-Length; its status 0 means that the server closed without one."""
        while b"\r\n\r\n" not in self._buffer:
            if not self._receive():
                return RawAnswer(0, {}, self._buffer)
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        length = int(headers.get("content-length", "0"))
        while len(self._buffer) < length and self._receive():
            pass
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return RawAnswer(int(lines[0].split(" ")[1]), headers, body)

    def at_end(self) -> bool:
        """Wait until the server has closed; whether it had sent nothing more."""
        while self._receive():
            pass
        return not self._buffer

    def _receive(self) -> bool:
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)


def exchange(url: str, request: bytes | str) -> RawAnswer:
    """Send these bytes on a connection of their own; gives the first answer."""
    with Connection(url) as connection:
        connection.send(request)
        return connection.answer()
