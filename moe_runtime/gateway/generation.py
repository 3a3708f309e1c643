"""One HTTP request's work: submit its prompts, gather what comes back, free what is left, and all of it in time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from moe_runtime.gateway.choice import Choice, Delta
from moe_runtime.gateway.engine_client import EngineClient, Mailbox
from moe_runtime.gateway.errors import ApiError, from_engine, invalid
from moe_runtime.protocol.messages import RequestFailed, TokenOutput


class Usage(msgspec.Struct, frozen=True):
    """Token counts over all choices: each prompt once, and every new token, also the one that ended a text."""

    prompt_tokens: int
    completion_tokens: int


class Deadline(msgspec.Struct, frozen=True):
    """When a request's time is over. at: on the event loop's clock; limit_s: for the message."""

    at: float
    limit_s: float


class Generation:
    """All choices of one HTTP request. max_open: how many texts may be in work at once, others' included."""

    def __init__(self, engine: EngineClient, choices: Sequence[Choice], deadline: Deadline, max_open: int) -> None:
        self.choices = choices
        self.deadline = deadline
        self._engine = engine
        self._max_open = max_open
        self._prompt_tokens = sum(choice.prompt_tokens for choice in choices)

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(self._prompt_tokens, sum(choice.completion_tokens for choice in self.choices))

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Submit, then yield text as it comes. Raises ApiError when a choice fails or time is over.

        However it ends (a failure, a stop string, cancellation, aclose), no request stays behind on a node.
        """
        mailbox: Mailbox = asyncio.Queue()
        unfinished = {choice.submit.request_id: choice for choice in self.choices}
        alarm = asyncio.get_running_loop().call_at(self.deadline.at, self._expire, unfinished, mailbox)
        outcome = "abort"
        try:
            check_room(self._engine.open_requests, len(self.choices), self._max_open)
            for choice in self.choices:
                self._engine.submit(choice.submit, mailbox)
            while unfinished:
                message = await mailbox.get()
                unfinished_choice = unfinished.get(message.request_id)
                if unfinished_choice is None:
                    continue  # what was on its way when a stop string came
                if isinstance(message, RequestFailed):
                    raise from_engine(message)
                delta = self._accept(unfinished_choice, message)
                if delta.finish_reason is not None:
                    del unfinished[message.request_id]
                    self._engine.abort(message.request_id)
                if delta.text or delta.scored or delta.finish_reason is not None:
                    yield delta
        except ApiError as error:
            outcome = error.code or "invalid"
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            alarm.cancel()
            for request_id, choice in unfinished.items():
                self._engine.abort(request_id)
                choice.clock.failed(outcome)

    def _expire(self, unfinished: dict[str, Choice], mailbox: Mailbox) -> None:
        """Free the nodes now, even if the client is slow to read; what has come already is still sent."""
        message = f"the answer was not complete after {self.deadline.limit_s:g} s"
        for request_id in unfinished:
            self._engine.abort(request_id)
            mailbox.put_nowait(RequestFailed(request_id, "timeout", message))

    def _accept(self, choice: Choice, output: TokenOutput) -> Delta:
        delta = choice.accept(output)
        if delta.text:
            choice.clock.text()
        if delta.finish_reason is not None:
            choice.clock.finished(delta.finish_reason, choice.prompt_tokens, choice.completion_tokens)
        return delta


def check_room(open_requests: int, choices: int, most: int) -> None:
    """Raises ApiError 429 if so many more texts are too many now, 400 if they always are."""
    if choices > most:
        raise invalid(f"{choices} choices are more than the {most} that this server works on at once", "n")
    if open_requests + choices > most:
        raise ApiError(429, f"{open_requests} texts are being generated, at most {most} can be", code="overloaded")
