"""X-Request-Id: honoured, made up, refused; on every answer, and in the log of failures."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Cluster
from fake_controller import make_config
from fake_engine import Answer
from own_gateway import gateway
from raw_http import exchange
from tiny_tokenizer import ids

JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "x"}]

# (method, path, body, headers, status): an answer of every kind.
ANSWERS: list[tuple[str, str, bytes, dict[str, str], int]] = [
    ("GET", "/health", b"", {}, 200),
    ("GET", "/metrics", b"", {}, 200),
    ("GET", "/version", b"", {}, 200),
    ("GET", "/openapi.json", b"", {}, 200),
    ("GET", "/v1/models", b"", {}, 200),
    ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 1}', JSON, 200),
    ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 1, "stream": true}', JSON, 200),
    ("POST", "/tokenize", b'{"prompt": "x"}', JSON, 200),
    ("POST", "/v1/completions", b"{", JSON, 400),
    ("GET", "/nothing", b"", {}, 404),
    ("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES, "model": "no"}).encode(), JSON, 404),
    ("DELETE", "/v1/completions", b"", {}, 405),
    ("HEAD", "/health", b"", {}, 405),
    ("POST", "/v1/completions", b"x" * 1_000_001, JSON, 413),
    ("POST", "/detokenize", b"{}", {}, 415),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status"), ANSWERS, ids=lambda value: str(value)[:40])
def test_it_is_on_every_answer(
    cluster: Cluster, method: str, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    given = f"ours: {method} {path} #{status}"
    answer = cluster.http.request(method, path, content=body, headers={**headers, "x-request-id": given})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, given)
    answer = cluster.http.request(method, path, content=body, headers=headers)
    assert answer.status_code == status and len(answer.headers["x-request-id"]) == 32


def test_what_is_made_up_differs(cluster: Cluster) -> None:
    assert len({cluster.http.get("/health").headers["x-request-id"] for _ in range(20)}) == 20


@pytest.mark.parametrize("given", ["a", "!", "~", "a b", "x" * 128, "id=\"1\"; <b>, 'c'"])
def test_printable_ascii_is_honoured(cluster: Cluster, given: str) -> None:
    answer = exchange(cluster.url, f"GET /health HTTP/1.1\r\nHost: x\r\nX-REQUEST-ID:  {given} \r\n\r\n")
    assert (answer.status, answer.headers["x-request-id"]) == (200, given)


@pytest.mark.parametrize("given", ["", "x" * 129, "é", "a\tb", "\x80", "日".encode().decode("latin-1")])
def test_anything_else_is_refused_on_every_route(cluster: Cluster, given: str) -> None:
    for path in ("/health", "/v1/models", "/nothing"):
        answer = exchange(cluster.url, f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {given}\r\n\r\n")
        assert answer.status == 400 and "X-Request-Id" in answer.error["message"]
        assert len(answer.headers["x-request-id"]) == 32


def test_two_are_one_too_many(cluster: Cluster) -> None:
    head = "GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\nX-Request-Id: b\r\n\r\n"
    assert exchange(cluster.url, head).status == 400


def test_the_engines_refusals_have_it(cluster: Cluster) -> None:
    for kind, status in (("overloaded", 429), ("unavailable", 503), ("internal", 500)):
        cluster.script(lambda submit, kind=kind: Answer([], failure=(kind, "no")))
        answer = cluster.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": kind})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, kind)


def test_failures_are_logged_with_it(model_dir: Path) -> None:
    def ask(url: str, request_id: str, **body: Any) -> None:
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", **body}, headers={"x-request-id": request_id})

    with gateway(model_dir, make_config()) as (process, engine):
        url = process.wait_serving()
        ask(url, "a-good-one")
        engine.script = lambda submit: Answer([], failure=("internal", "the node broke"))
        ask(url, "a-whole-one")
        engine.script = lambda submit: Answer([(ids("a")[0],)], failure=("internal", "it broke again"))
        ask(url, "a-streamed-one", stream=True)
        log = process.close()
    assert "[a-whole-one]" in log and "the node broke" in log
    assert "[a-streamed-one]" in log and "it broke again" in log
    assert "a-good-one" not in log
