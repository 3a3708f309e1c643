"""Server-sent events, and leaving at once when the client does."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from moe_runtime.gateway.errors import ApiError, ClientGoneError
from moe_runtime.gateway.generation import Delta, Generation
from moe_runtime.gateway.responses import Body, Form

Result = TypeVar("Result")

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client disconnects. Raises ClientGoneError then.

    The request's body must have been read whole, so that the next thing to receive is the disconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("before its answer was complete")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def sse_events(
    form: Form, generation: Generation, first: Delta, rest: AsyncGenerator[Delta, None], choices: int, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The whole event stream: opening, text, finish, usage, [DONE]; or an error event, after which it ends."""
    for body in [*form.opening(choices), *form.chunks(first)]:
        yield _event(body)
    try:
        async for delta in rest:
            for body in form.chunks(delta):
                yield _event(body)
    except ApiError as error:
        yield _event(error.body())
        return
    if with_usage:
        yield _event(form.closing(generation.usage))
    yield b"data: [DONE]\n\n"


def _event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """Sends events as they come. `deltas` is closed in every case, which frees the request on its node."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], deltas: AsyncGenerator[Delta, None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._pump(send))
        except ClientGoneError:
            return
        finally:
            await self._events.aclose()
            await self._deltas.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
