"""What a client can do with a request, well behaved or not, and whether the server kept its word."""

import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from tests.serving.answers import Answer, same, streamed_answer, whole_answer
from tests.serving.fuzz_requests import Draw, Request, invalid_request
from tests.serving.wire import TIMEOUT_S, connect, read_events, receive, send, strict_json

_LONG = {"max_tokens": 100, "ignore_eos": True, "min_tokens": 100, "n": 2, "stop": None, "stop_token_ids": None}


@dataclass(frozen=True)
class Known:
    """A valid request and its right answer."""

    request: Request
    answer: Answer


class Client:
    """One thread's client: it keeps its connection from request to request now and then, as clients do."""

    def __init__(self, url: str, draw: Draw) -> None:
        self._url = url
        self._draw = draw
        self._connection: HTTPConnection | None = None

    def whole(self, known: Known) -> str:
        connection = self._open()
        send(connection, known.request.path, known.request.body)
        reply = receive(connection)
        assert reply.status == 200, (reply.status, reply.content[:300], known.request)
        _check(whole_answer(reply.json), known)
        return "right"

    def streamed(self, known: Known, pause_s: float = 0.0) -> str:
        """pause_s: how long a slow reader sleeps after each event."""
        connection = self._slow_connection() if pause_s else self._open()
        send(connection, known.request.path, _streaming(known.request.body))
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read()[:300], known.request)
        events = []
        for data in read_events(response):
            events.append(data)
            time.sleep(pause_s)
        assert events.pop() == b"[DONE]", (known.request, events[-1:])
        _check(streamed_answer([strict_json(event) for event in events]), known)
        return "right"

    def slow(self, known: Known) -> str:
        return self.streamed(known, pause_s=self._draw.uniform(0.005, 0.03))

    def refused(self) -> str:
        request = invalid_request(self._draw)
        connection = self._open()
        send(connection, request.path, request.body)
        reply = receive(connection)
        assert request.refused is not None
        status, param = request.refused
        assert reply.status == status, (reply.status, reply.content[:300], request)
        error = reply.error
        named = error["param"].split("[")[0].split(".")[0] if error["param"] else None
        assert named == param, (error, request)
        return str(status)

    def hurried(self, known: Known) -> str:
        """With a time limit that may or may not be enough: the right answer, or the documented error."""
        body = {**known.request.body, "timeout": 10 ** self._draw.uniform(-3, 1)}
        connection = self._open()
        if self._draw.random() < 0.5:
            send(connection, known.request.path, body)
            reply = receive(connection)
            if reply.status == 200:
                _check(whole_answer(reply.json), known)
                return "right"
            assert (reply.status, reply.error["code"]) == (408, "timeout"), (reply.status, reply.content[:300])
            return "408"
        send(connection, known.request.path, _streaming(body))
        response = connection.getresponse()
        if response.status != 200:
            assert (response.status, strict_json(response.read())["error"]["code"]) == (408, "timeout")
            return "408"
        events = list(read_events(response))
        if events[-1] != b"[DONE]":
            assert strict_json(events[-1])["error"]["code"] == "timeout", events[-1]
            return "408 in mid-stream"
        _check(streamed_answer([strict_json(event) for event in events[:-1]]), known)
        return "right"

    def leaves(self, known: Known) -> str:
        """Goes away: while sending, while waiting, or in the middle of the stream."""
        connection = connect(self._url)
        body = {**known.request.body, **_LONG}
        body.pop("prompt_logprobs", None)
        kind = self._draw.choice(["sending", "waiting", "reading"])
        try:
            if kind == "sending":
                _send_half(connection, known.request.path, body)
            elif kind == "waiting":
                send(connection, known.request.path, body)
                time.sleep(self._draw.uniform(0, 0.1))
            else:
                send(connection, known.request.path, _streaming(body))
                events = read_events(connection.getresponse())
                for _ in range(self._draw.randint(1, 6)):
                    next(events, None)
        finally:
            connection.close()
        return kind

    def asks_state(self) -> str:
        path = self._draw.choice(["/health", "/ready", "/metrics", "/v1/models", "/openapi.json"])
        connection = self._open()
        send(connection, path, None)
        assert receive(connection).status == 200, path
        return "right"

    def tokenizes(self) -> str:
        text = self._draw.choice(["x", "Příliš žluťoučký 🦙 kůň\x00", "the number of " * 200])
        connection = self._open()
        send(connection, "/tokenize", {"prompt": text})
        reply = receive(connection)
        assert reply.status == 200, reply.content[:300]
        send(connection, "/detokenize", {"tokens": reply.json["tokens"]})
        assert receive(connection).json["prompt"] == text
        return "right"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> HTTPConnection:
        if self._connection is None or self._draw.random() < 0.5:
            self.close()
            self._connection = connect(self._url)
        return self._connection

    def _slow_connection(self) -> HTTPConnection:
        """With so small a buffer that the server notices a reader who does not read."""
        self.close()
        address = urlsplit(self._url)
        self._connection = connect(self._url)
        self._connection.sock = socket.socket()
        self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self._connection.sock.settimeout(TIMEOUT_S)
        self._connection.sock.connect((address.hostname, address.port))
        return self._connection


def choose(draw: random.Random, client: Client, pool: list[Known]) -> tuple[str, Callable[[], str]]:
    """What to do next: its name, and how."""
    known = draw.choice(pool)
    streamable = draw.choice([one for one in pool if "prompt_logprobs" not in one.request.body])
    kinds: dict[str, tuple[float, Callable[[], str]]] = {
        "whole": (0.23, lambda: client.whole(known)),
        "streamed": (0.25, lambda: client.streamed(streamable)),
        "slow": (0.05, lambda: client.slow(streamable)),
        "invalid": (0.2, client.refused),
        "hurried": (0.07, lambda: client.hurried(streamable)),
        "leaves": (0.15, lambda: client.leaves(known)),
        "state": (0.03, client.asks_state),
        "tokenize": (0.02, client.tokenizes),
    }
    (kind,) = draw.choices(list(kinds), [weight for weight, _ in kinds.values()])
    return kind, kinds[kind][1]


def _check(answer: Answer, known: Known) -> None:
    assert same(answer, known.answer), f"{known.request}: {answer} is not {known.answer}"


def _streaming(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _send_half(connection: HTTPConnection, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    connection.putrequest("POST", path)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(content)))
    connection.endheaders()
    connection.send(content[: len(content) // 2])
