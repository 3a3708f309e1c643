"""One HTTP request's work: submit its prompts, turn tokens into text, stop where it should, free what is left."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from moe_runtime.gateway.detokenizer import Detokenizer
from moe_runtime.gateway.engine_client import EngineClient, Mailbox
from moe_runtime.gateway.errors import ApiError, from_engine
from moe_runtime.gateway.metrics import RequestClock
from moe_runtime.gateway.stop_strings import StopStrings
from moe_runtime.gateway.tokenizer import TextTokenizer
from moe_runtime.protocol.messages import RequestFailed, Submit, TokenOutput


@dataclass(frozen=True)
class Delta:
    """New text of one choice; finish_reason is `stop` or `length` in its last one."""

    index: int
    text: str
    finish_reason: str | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts over all choices; the end-of-text token counts as completion."""

    prompt_tokens: int
    completion_tokens: int


class Choice:
    """One prompt on its way to a text."""

    def __init__(
        self, index: int, submit: Submit, tokenizer: TextTokenizer, stops: Sequence[str], clock: RequestClock
    ) -> None:
        self.index = index
        self.submit = submit
        self.clock = clock
        self.completion_tokens = 0
        self._detokenizer = Detokenizer(tokenizer.decode, tokenizer.silent_ids, submit.prompt_ids)
        self._stops = StopStrings(stops)

    def accept(self, output: TokenOutput) -> Delta:
        """The text that these tokens complete. The token that ended the text (end-of-text) is not part of it."""
        text = ""
        last = len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            self.completion_tokens += 1
            if output.finish_reason == "stop" and position == last:
                continue
            text += self._stops.push(self._detokenizer.push(token))
            if self._stops.hit:
                return Delta(self.index, text, "stop")
        if output.finish_reason is None:
            return Delta(self.index, text)
        text += self._stops.push(self._detokenizer.finish())
        if self._stops.hit:
            return Delta(self.index, text, "stop")
        return Delta(self.index, text + self._stops.finish(), output.finish_reason)


class Generation:
    """All choices of one HTTP request."""

    def __init__(self, engine: EngineClient, choices: Sequence[Choice]) -> None:
        self._engine = engine
        self._choices = choices

    @property
    def usage(self) -> Usage:
        prompt_tokens = sum(len(choice.submit.prompt_ids) for choice in self._choices)
        return Usage(prompt_tokens, sum(choice.completion_tokens for choice in self._choices))

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Submit, then yield text as it comes. Raises ApiError when a choice fails.

        However it ends (a failure, a stop string, cancellation, aclose), no request stays behind on a node.
        """
        mailbox: Mailbox = asyncio.Queue()
        unfinished = {choice.submit.request_id: choice for choice in self._choices}
        outcome = "abort"
        try:
            for choice in self._choices:
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
                if delta.text or delta.finish_reason is not None:
                    yield delta
        except ApiError as error:
            outcome = error.code or "invalid"
            raise
        finally:
            for request_id, choice in unfinished.items():
                self._engine.abort(request_id)
                choice.clock.failed(outcome)

    def _accept(self, choice: Choice, output: TokenOutput) -> Delta:
        delta = choice.accept(output)
        if delta.text:
            choice.clock.text()
        if delta.finish_reason is not None:
            choice.clock.finished(delta.finish_reason, len(choice.submit.prompt_ids), choice.completion_tokens)
        return delta
