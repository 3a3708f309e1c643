"""HTTP as it is on the wire: requests by the standard library, answers taken apart without any client's kindness."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.content)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that must be one, in OpenAI's form."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"] and error["type"], error
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a whole stream, which must end with [DONE]."""
        assert self.status == 200, self.content
        assert self.headers["content-type"].startswith("text/event-stream")
        *data, last = [event.removeprefix(b"data: ") for event in self.content.split(b"\n\n") if event]
        assert last == b"[DONE]", self.content[-200:]
        return [strict_json(event) for event in data]


def strict_json(content: bytes) -> Any:
    """UTF-8 JSON by the standard's letter: Python's own reader would take NaN."""
    return json.loads(content.decode("utf-8"), parse_constant=_refuse)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def connect(url: str, timeout_s: float = TIMEOUT_S) -> HTTPConnection:
    address = urlsplit(url)
    return HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)


def send(connection: HTTPConnection, path: str, body: Any) -> None:
    """Bytes go as they are, anything else as JSON, and None is a GET."""
    if body is None:
        connection.request("GET", path)
    else:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, content, JSON)


def receive(connection: HTTPConnection) -> Reply:
    response = connection.getresponse()
    return Reply(response.status, lower_headers(response), response.read())


def lower_headers(response: HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def read_events(response: HTTPResponse) -> Iterator[bytes]:
    """Each event's data as it comes."""
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].rstrip(b"\n")


def call(url: str, path: str, body: Any = None) -> Reply:
    connection = connect(url)
    try:
        send(connection, path, body)
        return receive(connection)
    finally:
        connection.close()
