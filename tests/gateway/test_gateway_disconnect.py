"""Clients that leave: their requests are freed on the engine at once, streamed or not, waiting or running."""

import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from conftest import Cluster
from fake_controller import last_samples, wait_until
from fake_engine import Answer

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def leave(cluster: Cluster, body: dict[str, Any], after: int) -> None:
    """Send a request on a socket of its own, read at least `after` bytes of the answer, and close."""
    address = urlsplit(cluster.url)
    content = json.dumps(body).encode()
    head = f"{HEAD}Content-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(head.encode() + content)
        wait_until(lambda: len(cluster.submitted) > 0, "the request to reach the engine")
        received = 0
        while received < after:
            received += len(connection.recv(65536))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_leaving_aborts(cluster: Cluster, stream: bool, running: bool) -> None:
    cluster.script(lambda submit: Answer([(65,)] * 100_000, finish=None))
    cluster.hold(not running, step_s=0.005)
    body = {"prompt": ["a", "b"], "stream": stream, "max_tokens": 300}
    leave(cluster, body, after=500 if stream and running else 0)
    wait_until(lambda: len(cluster.aborted) == 2 and not cluster.open, "both to be aborted", timeout_s=5)
    wait_until(lambda: last_samples(cluster.controller)["gateway_open_requests"] == 0, "the gateway to forget them")
    assert last_samples(cluster.controller)["gateway_outstanding_tokens"] == 0


def test_leaving_harms_nobody_else(cluster: Cluster) -> None:
    cluster.hold(False, step_s=0.01)
    texts: list[str] = []

    def ask() -> None:
        texts.append(cluster.openai.completions.create(model="tiny/model", prompt="abc", max_tokens=60).choices[0].text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        leave(cluster, {"prompt": "zz", "stream": True, "max_tokens": 300}, after=300)
    for thread in threads:
        thread.join(30)
    assert texts == ["abc" * 20] * 4


def test_a_slow_reader_blocks_nobody_and_gets_everything(cluster: Cluster) -> None:
    with cluster.http.stream(
        "POST", "/v1/completions", json={"prompt": "ab", "stream": True, "max_tokens": 390}
    ) as slow:
        lines = slow.iter_lines()
        next(lines)
        assert cluster.openai.completions.create(model="tiny/model", prompt="x", max_tokens=2).choices[0].text == "xx"
        time.sleep(0.2)
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))
    assert text == ("ab" * 195)[1:]


def test_a_client_that_leaves_while_sending_its_body(cluster: Cluster) -> None:
    address = urlsplit(cluster.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n".encode() + b'{"prompt": ')
    assert cluster.http.get("/health").status_code == 200
    assert not cluster.submitted


def test_many_cancelled_at_random_leave_nothing(cluster: Cluster) -> None:
    cluster.hold(False, step_s=0.002)

    def ask(index: int) -> None:
        body = {"prompt": "abc" * (1 + index % 5), "stream": index % 2 == 0, "max_tokens": 20 + index}
        timeout = httpx.Timeout(30, read=0.03 * (index % 4) or 30)
        try:
            response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=timeout)
        except httpx.ReadTimeout:
            return
        assert response.status_code == 200

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wait_until(lambda: not cluster.open, "the engines to be empty")
    wait_until(lambda: last_samples(cluster.controller)["gateway_open_requests"] == 0, "the gateway to be empty")
    assert last_samples(cluster.controller)["gateway_outstanding_tokens"] == 0
