"""X-Request-Id: every request has one, every answer shows it, and so does every log line about it."""

import logging
import re
import uuid
from collections.abc import Callable
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_runtime.gateway.error_answers import error_answer
from moe_runtime.gateway.errors import ApiError, invalid

HEADER = "x-request-id"
# Printable ASCII; HTTP itself drops spaces at either end.
PATTERN = "[!-~]([ -~]{0,126}[!-~])?"
_VALID = re.compile(PATTERN)
# Of a request's line and headers together.
MAX_HEAD_BYTES = 32 * 1024
_current: ContextVar[str] = ContextVar("request_id", default="-")


class RequestIds:
    """The outermost ASGI middleware.

    count: called once per request with the route's path (None where there is none) and the status: that of the answer,
    499 where the client left before its end, 500 where it broke off.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str | None, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()]
        valid = len(given) == 1 and _VALID.fullmatch(given[0])
        request_id = given[0] if valid else new_request_id()
        # Each request is a task of its own, so the value lives as long as the request.
        _current.set(request_id)
        answer = _Answer(send, request_id)
        app = self._app
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            app = error_answer(head_too_large())
        elif given and not valid:
            app = error_answer(invalid("X-Request-Id must be 1 to 128 printable ASCII characters, given once"))
        status = 500
        try:
            await app(scope, receive, answer.send)
            status = answer.status if answer.complete else 499
        finally:
            route = scope.get("route")
            self._count(getattr(route, "path", None), status)


class _Answer:
    """Watches what is sent, and puts the id into its header."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.status = 0
        self.complete = False
        self._send = send
        self._request_id = request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[HEADER] = self._request_id
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        await self._send(message)


def head_too_large() -> ApiError:
    return ApiError(431, f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")


def _head_bytes(scope: Scope) -> int:
    # h11 bounds what is incomplete; what comes in one piece it takes.
    headers = sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


class RequestIdFilter(logging.Filter):
    """Gives each record the attribute request_id: that of the request during which it was logged, else `-`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _current.get()
        return True


def new_request_id() -> str:
    return uuid.uuid4().hex
