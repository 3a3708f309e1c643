"""What clients see of a fault in the gateway itself: the application alone, over a service that breaks."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moe_runtime.gateway.app import create_app
from moe_runtime.gateway.auth import ApiKeys
from moe_runtime.gateway.request_ids import RequestIdFilter, RequestIds
from moe_runtime.gateway.sampling import Limits

Counts = list[tuple[str | None, int]]


def broken_service(counts: Counts) -> Any:
    """As much of a service as the application needs to start; its health raises."""

    def ill() -> None:
        raise RuntimeError("a secret of the gateway")

    metrics = SimpleNamespace(answered=lambda route, status: counts.append((route, status)))
    return SimpleNamespace(models=("m",), model="m", created=1, limits=Limits(9, 9, 9, ()), metrics=metrics, ill=ill)


def ask(app: Any, path: str, **headers: str) -> httpx.Response:
    async def asking() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(asking())


def test_a_bug_is_a_500_in_the_usual_form_that_tells_nothing() -> None:
    counts: Counts = []
    answer = ask(create_app(broken_service(counts), None), "/health", **{"x-request-id": "mine"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine"
    assert answer.json()["error"]["code"] == "internal" and "secret" not in answer.text
    assert counts == [("/health", 500)]


def test_requests_without_a_key_are_counted() -> None:
    counts: Counts = []
    app = create_app(broken_service(counts), ApiKeys(["k"]))
    assert ask(app, "/v1/models").status_code == 401
    assert ask(app, "/v1/models", authorization="Bearer k").status_code == 200
    assert counts == [(None, 401), ("/v1/models", 200)]


def call(app: Any, *headers: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    """Run the application on its own; gives what it sent."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": headers, "raw_path": b"/", "query_string": b""}
    asyncio.run(app(scope, None, send))
    return sent


@pytest.mark.parametrize(("breaks", "status"), [(True, 500), (False, 499)])
def test_an_answer_that_breaks_off_is_counted(breaks: bool, status: int) -> None:
    async def half(_scope: Any, _receive: Any, send: Callable[[Any], Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if breaks:
            raise RuntimeError

    counts: Counts = []
    app = RequestIds(half, lambda route, status: counts.append((route, status)))
    with pytest.raises(RuntimeError) if breaks else nullcontext():
        assert dict(call(app)[0]["headers"])[b"x-request-id"]
    assert counts == [(None, status)]


def test_log_lines_name_the_request(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("a part of the gateway")
    caplog.handler.addFilter(RequestIdFilter())

    async def logs(_scope: Any, _receive: Any, _send: Any) -> None:
        logger.error("during a request")

    logger.error("outside")
    call(RequestIds(logs, lambda *_: None), (b"x-request-id", b"mine"))
    assert [(record.message, record.request_id) for record in caplog.records] == [  # type: ignore[attr-defined]
        ("outside", "-"),
        ("during a request", "mine"),
    ]
