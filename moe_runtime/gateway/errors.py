"""What can go wrong with a request, as the status and body that OpenAI's clients understand."""

import logging
from collections.abc import Mapping
from typing import Any

from moe_runtime.protocol.messages import RequestFailed

logger = logging.getLogger(__name__)

_KINDS = {"invalid": 400, "timeout": 408, "overloaded": 429, "unavailable": 503, "internal": 500}
# How long clients should leave the server alone, in seconds: a queue moves on, a restart takes longer.
_RETRY_AFTER = {429: "1", 503: "5"}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault, `code` is a word that programs can test.

    headers: what the answer says in its header; 429 and 503 have Retry-After by themselves.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        retry_after = {"retry-after": _RETRY_AFTER[status]} if status in _RETRY_AFTER else {}
        self.headers = {**retry_after, **(headers or {})}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientGoneError(ConnectionError):
    """The client closed its connection; nobody will read an answer."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, param, code)


def own_fault() -> ApiError:
    """A 500 for what should not happen here; clients learn nothing of it."""
    return ApiError(500, "an error inside the gateway; its log has the details", code="internal")


def from_engine(failure: RequestFailed) -> ApiError:
    """The status that fits an engine's refusal. Its own faults are logged."""
    if failure.kind == "internal":
        logger.error("%s failed on its node: %s", failure.request_id, failure.message)
    return ApiError(_KINDS[failure.kind], failure.message, code=failure.kind)


def shorten(value: object, limit: int = 80) -> str:
    """repr of a client's value, cut so that no error message repeats a whole body."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
