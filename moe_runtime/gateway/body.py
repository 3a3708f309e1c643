"""A request's body: bounded before it is read, strict JSON, then the model. Every fault is an ApiError."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from moe_runtime.gateway.errors import ApiError, ClientGoneError, invalid
from moe_runtime.gateway.fields import RequestModel, to_api_error
from moe_runtime.gateway.offload import offload
from moe_runtime.gateway.service import Service

Model = TypeVar("Model", bound=RequestModel)

# A body up to this many times the limit is read and thrown away, since a client still writing would miss the answer.
_DISCARD_FACTOR = 4
# So many bytes of JSON are as much work as tokenizing a character.
_BYTES_PER_CHARACTER = 16


async def parse_body(request: Request, service: Service, choose: Callable[[Any], type[Model]]) -> Model:
    """Read and check the body; `choose` says which model the parsed JSON shall be.

    Raises ApiError 400, 408, 413 or 415, and ClientGoneError.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "the content type must be application/json")
    try:
        async with asyncio.timeout(service.request_timeout_s):
            body = await _read(request, service.max_body_bytes)
    except ClientDisconnect as error:
        raise ClientGoneError("while sending its request") from error
    except TimeoutError as error:
        message = f"the body did not come within {service.request_timeout_s:g} s"
        raise ApiError(408, message, code="timeout") from error
    return await offload(len(body) // _BYTES_PER_CHARACTER, lambda: _checked(body, choose))


def _checked(body: bytes, choose: Callable[[Any], type[Model]]) -> Model:
    value = _strict_json(body)
    try:
        return choose(value).model_validate(value)
    except ValidationError as error:
        raise to_api_error(error) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    # A client that waits to be told to go on (RFC 9110, 10.1.1) has sent nothing that would have to be discarded.
    patience = 1 if request.headers.get("expect", "").lower() == "100-continue" else _DISCARD_FACTOR
    if declared.isdigit() and int(declared) > max_bytes * patience:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes * _DISCARD_FACTOR:
            raise _too_large(max_bytes)
        if size > max_bytes:
            chunks.clear()
        else:
            chunks.append(chunk)
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes (gateway.max_body_bytes)")


def _strict_json(body: bytes) -> Any:
    """RFC 8259: no NaN or Infinity, no lone surrogates, bounded nesting."""
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
