"""Server-sent events, and leaving at once when the client does."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from moe_runtime.gateway.choice import Delta
from moe_runtime.gateway.errors import ApiError, ClientGoneError, own_fault
from moe_runtime.gateway.generation import Deadline, Generation, Usage
from moe_runtime.gateway.offload import offload
from moe_runtime.gateway.responses import Body, Form, usage_body
from moe_runtime.gateway.schema import GenerationRequest

Result = TypeVar("Result")

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# After a request's time is over: for a slow client to read what came in time.
_GRACE_S = 60.0

_encode = msgspec.json.Encoder().encode


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


class EventWriter:
    """The bytes of one stream. What all chunks share is encoded once; where a chunk has its usage, that is last."""

    def __init__(self, form: Form, generation: Generation, request: GenerationRequest) -> None:
        self._form = form
        self._generation = generation
        self._continuous = request.continuous_usage
        self._start = b"data: " + _encode(form.head)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def opening(self) -> bytes:
        """The chunks before any text."""
        choices = self._form.opening(len(self._generation.choices))
        return self._chunks(choices, Usage(self._generation.usage.prompt_tokens, 0) if self._continuous else None)

    def delta(self, delta: Delta) -> bytes:
        """The chunks of one delta, which must be the newest."""
        return self._chunks(self._form.chunks(delta), self._generation.usage if self._continuous else None)

    def closing(self) -> bytes:
        """The chunk that has the usage and no choices."""
        return self._start + _end_with(self._generation.usage)

    def _chunks(self, choices: list[Body], usage: Usage | None) -> bytes:
        end = self._end if usage is None else _end_with(usage)
        return b"".join([self._start + _encode(choice) + end for choice in choices])


def _end_with(usage: Usage) -> bytes:
    return b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n"


async def sse_events(
    form: Form, generation: Generation, first: Delta, rest: AsyncGenerator[Delta, None], request: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """The whole event stream: opening, text, finish, usage, [DONE]; or an error event, after which it ends.

    A fault of the gateway itself is such an event too, before it is raised.
    """
    writer = EventWriter(form, generation, request)
    yield writer.opening() + await _written(writer, first)
    try:
        async for delta in rest:
            yield await _written(writer, delta)
    except ApiError as error:
        yield _error_event(error)
        return
    except Exception:
        yield _error_event(own_fault())
        raise
    if request.include_usage:
        yield writer.closing()
    yield b"data: [DONE]\n\n"


def _error_event(error: ApiError) -> bytes:
    return b"data: " + _encode(error.body()) + b"\n\n"


async def _written(writer: EventWriter, delta: Delta) -> bytes:
    return await offload(len(delta.scored), lambda: writer.delta(delta))


class EventStream(Response):
    """Sends events as they come, until the client leaves or the deadline is long over.

    `deltas` is closed in every case, which frees the request on its node.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], deltas: AsyncGenerator[Delta, None], deadline: Deadline
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._deltas = deltas
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._deadline.at + _GRACE_S):
                await while_connected(receive, self._pump(send))
        except (ClientGoneError, TimeoutError):
            return
        finally:
            await self._events.aclose()
            await self._deltas.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
