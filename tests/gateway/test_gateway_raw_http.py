"""HTTP at its edges: what is no HTTP, heads and bodies that never end, pipelines, and servers that outlive them."""

import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvloop
from conftest import Cluster
from fake_controller import last_samples, make_config, wait_until
from own_gateway import gateway
from raw_http import Connection, exchange
from starlette.responses import PlainTextResponse
from test_gateway_state import metrics

from moe_runtime.config import GatewayConfig
from moe_runtime.gateway.http_server import HttpServer, bind, make_server, url_of
from moe_runtime.gateway.request_ids import MAX_HEAD_BYTES

POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = f"{POST}Transfer-Encoding: chunked\r\n\r\n"
GOOD_BODY = '{"prompt": "x", "max_tokens": 1}'


@pytest.fixture(autouse=True)
def the_server_lives(cluster: Cluster) -> Iterator[None]:
    yield
    assert exchange(cluster.url, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n").status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n",
        b"\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n: no name\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        POST.encode() + b"Content-Length: ten\r\n\r\n",
        POST.encode() + b"Content-Length: -1\r\n\r\n",
        POST.encode() + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n12",
        POST.encode() + b"Transfer-Encoding: gzip\r\n\r\n",
        CHUNKED.encode() + b"zz\r\n",
        CHUNKED.encode() + b"5\r\nabcdefgh\r\n",
        CHUNKED.encode() + b"fffffffffffffffffffffffffffffff\r\n",
    ],
    ids=lambda data: repr(data)[2:40],
)
def test_what_is_no_http_is_refused_as_json(cluster: Cluster, request_bytes: bytes) -> None:
    with Connection(cluster.url) as connection:
        connection.send(request_bytes)
        answer = connection.answer()
        assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
        assert len(answer.headers["x-request-id"]) == 32
        assert connection.at_end()


def test_a_thousand_mutilated_requests(cluster: Cluster) -> None:
    """Bytes flipped, cut out, doubled; each connection is answered or closed, and nothing is left behind."""
    random_bytes = random.Random(7)
    whole = f"{POST}X-Request-Id: a\r\nContent-Length: {len(GOOD_BODY)}\r\n\r\n{GOOD_BODY}".encode()
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(random_bytes.randint(1, 4)):
            start = random_bytes.randrange(len(data))
            end = start + random_bytes.randint(1, 12)
            data[start:end] = random_bytes.choice(
                [b"", data[start:end] * 2, random_bytes.randbytes(random_bytes.randint(1, 6)), b"\r\n", b"\x00", b"9"]
            )
        with Connection(cluster.url) as connection:
            connection.send(bytes(data))
            connection.socket.shutdown(socket.SHUT_WR)
            connection.at_end()
    wait_until(lambda: last_samples(cluster.controller)["gateway_open_requests"] == 0, "the gateway to be empty")


def test_a_fault_in_the_body_after_the_answer_ends_the_connection(cluster: Cluster) -> None:
    with Connection(cluster.url) as connection:
        connection.send("POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert connection.answer().status == 404
        connection.send("zz\r\n")
        assert connection.at_end()


@pytest.mark.parametrize(
    "head",
    [
        f"GET /health HTTP/1.1\r\nHost: x\r\nX: {'x' * MAX_HEAD_BYTES}\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\n" + "A: b\r\n" * 10_000 + "\r\n",
        f"GET /{'x' * MAX_HEAD_BYTES} HTTP/1.1\r\nHost: x\r\n\r\n",
        "x" * (2 * MAX_HEAD_BYTES),
    ],
    ids=["one header", "many headers", "path", "no end"],
)
def test_a_head_that_is_too_large_is_431(cluster: Cluster, head: str) -> None:
    answer = exchange(cluster.url, head)
    assert answer.status == 431 and str(MAX_HEAD_BYTES) in answer.error["message"]
    assert answer.headers["x-request-id"]


def test_a_large_head_is_accepted(cluster: Cluster) -> None:
    head = "GET /health HTTP/1.1\r\nHost: x\r\nX: " + "x" * (MAX_HEAD_BYTES - 200) + "\r\n\r\n"
    assert exchange(cluster.url, head).status == 200


def test_pipelined_requests_are_answered_in_turn(cluster: Cluster) -> None:
    with Connection(cluster.url) as connection:
        request = f"{POST}Content-Length: {len(GOOD_BODY)}\r\n\r\n{GOOD_BODY}"
        connection.send((request + "GET /version HTTP/1.1\r\nHost: x\r\n\r\n") * 5)
        for _ in range(5):
            assert json.loads(connection.answer().body)["choices"][0]["text"] == "x"
            assert "version" in json.loads(connection.answer().body)


def test_a_body_byte_by_byte(cluster: Cluster) -> None:
    with Connection(cluster.url) as connection:
        for byte in f"{POST}Content-Length: {len(GOOD_BODY)}\r\n\r\n{GOOD_BODY}":
            connection.send(byte)
        assert connection.answer().status == 200


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_is_declined(cluster: Cluster, protocol: str) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n"
    assert exchange(cluster.url, head).status == 200


def test_a_client_that_waits_is_told_to_go_on_or_refused_at_once(cluster: Cluster) -> None:
    with Connection(cluster.url) as connection:
        connection.send(f"{POST}Expect: 100-continue\r\nContent-Length: {len(GOOD_BODY)}\r\n\r\n")
        assert connection.answer().status == 100
        connection.send(GOOD_BODY)
        assert connection.answer().status == 200
    answer = exchange(cluster.url, f"{POST}Expect: 100-continue\r\nContent-Length: 1000001\r\n\r\n")
    assert answer.status == 413 and answer.error


def test_http_1_0_and_absolute_targets(cluster: Cluster) -> None:
    assert exchange(cluster.url, "GET /health HTTP/1.0\r\n\r\n").status == 200
    assert exchange(cluster.url, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").error
    for target in ("http://x/health", "*"):
        answer = exchange(cluster.url, f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.status == 404 and answer.error


def test_methods_and_paths_that_are_not_there(cluster: Cluster) -> None:
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "GET", "BREW"):
        answer = exchange(cluster.url, f"{method} /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.status == 405 and answer.headers["allow"] == "POST" and answer.error
    for path in ("/v1/completions/", "/v1", "/v1/completions%00", "/%ff%fe", "/v1//completions", "/" + "%2e%2e/" * 9):
        answer = exchange(cluster.url, f"POST {path} HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.status == 404 and answer.error


@pytest.mark.parametrize("sent", ["", '{"prompt": '])
def test_leaving_while_sending_is_counted_as_499(cluster: Cluster, sent: str) -> None:
    key = "moe_runtime_http_responses_total{route=/v1/completions,status=499}"
    before = metrics(cluster).get(key, 0)
    with Connection(cluster.url) as connection:
        connection.send(f"{POST}Content-Length: 1000\r\n\r\n{sent}")
    wait_until(lambda: metrics(cluster).get(key, 0) == before + 1, "the count")


def test_a_body_that_never_comes_is_408(model_dir: Path) -> None:
    with gateway(model_dir, make_config(request_timeout_s=0.5)) as (process, engine):
        url = process.wait_serving()
        with Connection(url) as connection:
            connection.send(f"{POST}Content-Length: 1000\r\n\r\n" + '{"prompt":')
            answer = connection.answer()
        assert (answer.status, answer.error["code"]) == (408, "timeout")
        assert httpx.get(f"{url}/health").status_code == 200 and not engine.submitted
        assert last_samples(process.controller)["gateway_open_requests"] == 0


@pytest.fixture
def impatient() -> Iterator[str]:
    """A server that gives a connection one second for a request."""
    listener = bind(GatewayConfig(port=0))
    server = make_server(PlainTextResponse("here"), flush_s=1, idle_s=1)
    thread = threading.Thread(target=lambda: uvloop.run(_serve(server, listener)))
    thread.start()
    wait_until(lambda: server.started, "the server")
    yield url_of(listener)
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


async def _serve(server: HttpServer, listener: object) -> None:
    await server.serve(sockets=[listener])  # type: ignore[list-item]


@pytest.mark.parametrize("sent", ["", "GET / HTTP/1.1\r\nHo"])
@pytest.mark.parametrize("used", [False, True])
def test_a_silent_connection_ends(impatient: str, sent: str, used: bool) -> None:
    with Connection(impatient) as connection:
        if used:
            connection.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.answer().body == b"here"
        connection.send(sent)
        assert connection.at_end()
