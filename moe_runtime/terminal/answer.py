"""One streamed answer: its pieces as they come, and afterwards its text, length and times."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
import openai

from moe_runtime.terminal.faults import ServerError, explained
from moe_runtime.terminal.target import Target
from moe_runtime.terminal.text import well_formed


class Delta(msgspec.Struct, frozen=True):
    """What a chat chunk adds; servers of reasoning models name their thoughts in one of two ways."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of /v1/completions or /v1/chat/completions, as far as a terminal needs it."""

    choices: list[Choice] | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Piece:
    """A piece of text as the server sent it; thought: it belongs to the reasoning before the answer."""

    text: str
    thought: bool = False


class Answer:
    """Iterate once, for the pieces; what has come stays in `text` if the answer breaks off or is stopped.

    tokens: the server's count, None unless it came to an end. chunks: pieces received. seconds: from the first piece to
    the last; first_s: from the request to the first piece, None before it.
    """

    def __init__(self, send: Callable[[], Awaitable[openai.AsyncStream[object]]], target: Target) -> None:
        self.text = ""
        self.chunks = 0
        self.tokens: int | None = None
        self.finish_reason: str | None = None
        self.first_s: float | None = None
        self.seconds = 0.0
        self._send = send
        self._target = target

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        """Raises ServerError. Closing the iterator, or cancelling it, closes the stream, which frees the request."""
        started = time.monotonic()
        with explained(self._target, in_answer=False):
            stream = await self._send()
        async with stream:
            with explained(self._target, in_answer=True):
                while (event := await self._next(stream)) is not None:
                    for piece in self._read(event):
                        self._count(piece, time.monotonic() - started)
                        yield piece
        if self.finish_reason is None:
            raise ServerError("the answer broke off: the server closed the stream before the end; try again")

    async def _next(self, stream: openai.AsyncStream[object]) -> object | None:
        async with asyncio.timeout(self._target.timeout_s):
            return await anext(stream, None)

    def _read(self, event: object) -> list[Piece]:
        chunk = msgspec.convert(event, Chunk)
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self.tokens = chunk.usage.completion_tokens
        if not chunk.choices:
            return []
        choice = chunk.choices[0]
        self.finish_reason = choice.finish_reason or self.finish_reason
        delta = choice.delta or Delta()
        thought, text = delta.reasoning_content or delta.reasoning, delta.content or choice.text
        pieces = [Piece(thought or "", thought=True), Piece(text or "")]
        return [Piece(well_formed(piece.text), piece.thought) for piece in pieces if piece.text]

    def _count(self, piece: Piece, now_s: float) -> None:
        self.chunks += 1
        if self.first_s is None:
            self.first_s = now_s
        self.seconds = now_s - self.first_s
        if not piece.thought:
            self.text += piece.text


def summary(answer: Answer, stopped: bool = False) -> str:
    """How long, how fast, how ended: `23 tokens, 15.2 tokens/s, first after 0.31 s`.

    Speed is that of decoding: tokens after the first over the time after the first. Where the server gave no count,
    chunks stand for tokens, which `about` says.
    """
    tokens = answer.tokens if answer.tokens is not None else answer.chunks
    parts = [f"{'about ' if answer.tokens is None and tokens else ''}{tokens} token{'' if tokens == 1 else 's'}"]
    if answer.seconds > 0 and tokens > 1:
        parts.append(f"{(tokens - 1) / answer.seconds:.1f} tokens/s")
    if answer.first_s is not None:
        parts.append(f"first after {answer.first_s:.2f} s")
    if stopped:
        parts.append("stopped")
    elif answer.finish_reason == "length":
        parts.append("cut at the length limit (/set max_tokens=N)")
    elif answer.finish_reason not in (None, "stop"):
        parts.append(f"ended by {answer.finish_reason}")
    return ", ".join(parts)
