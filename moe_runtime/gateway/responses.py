"""The bodies of both endpoints, whole and in chunks, in OpenAI's forms."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moe_runtime.gateway.choice import Delta
from moe_runtime.gateway.generation import Usage
from moe_runtime.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from moe_runtime.gateway.score_forms import ScoreForms
from moe_runtime.gateway.scores import ScoredToken
from moe_runtime.gateway.token_bytes import TokenBytes
from moe_runtime.protocol.messages import TokenScore

Body = dict[str, Any]


@dataclass
class Answer:
    """One choice as a whole. prompt_scores are those of its prompt, where the request asks for them."""

    prompt_ids: Sequence[int]
    prompt_scores: Sequence[TokenScore]
    pieces: list[str] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, delta: Delta) -> None:
        self.pieces.append(delta.text)
        self.scored.extend(delta.scored)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Form(Protocol):
    """How one endpoint writes its answers. head: what all chunks of a stream share.

    prompt_field names the request's prompt in error messages.
    """

    id: str
    head: Body
    prompt_field: str

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Body:
        """The answer of a request without stream."""

    def opening(self, choices: int) -> list[Body]:
        """The choices of the chunks before any text, one chunk each."""

    def chunks(self, delta: Delta) -> list[Body]:
        """The same of one delta; exactly one in a stream has a choice's finish_reason."""


class CompletionForm:
    """/v1/completions. model: the name to show; token_bytes: how log-probabilities name tokens."""

    prompt_field = "prompt"

    def __init__(self, model: str, request: CompletionRequest, token_bytes: TokenBytes) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._scores = None if request.scored is None else ScoreForms(token_bytes, request.scored)
        self._prompt_scores = _prompt_forms(request, token_bytes)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Body:
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        return {**self.head, "choices": choices, "usage": usage_body(usage)}

    def opening(self, choices: int) -> list[Body]:
        return []

    def chunks(self, delta: Delta) -> list[Body]:
        logprobs = self._scores.completion(delta.scored) if self._scores and delta.scored else None
        return [_text_choice(delta.index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)]

    def _whole_choice(self, index: int, answer: Answer) -> Body:
        logprobs = self._scores.completion(answer.scored) if self._scores else None
        choice = _text_choice(index, answer.text, logprobs, answer.finish_reason, answer.stop_reason)
        if self._prompt_scores:
            choice["prompt_logprobs"] = self._prompt_scores.prompt(answer.prompt_ids, answer.prompt_scores)
        return choice


class ChatForm:
    """/v1/chat/completions; see CompletionForm."""

    prompt_field = "messages"

    def __init__(self, model: str, request: ChatRequest, token_bytes: TokenBytes) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.head = {"id": self.id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._scores = None if request.scored is None else ScoreForms(token_bytes, request.scored)
        self._prompt_scores = _prompt_forms(request, token_bytes)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Body:
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        body = {**self.head, "object": "chat.completion", "choices": choices, "usage": usage_body(usage)}
        if self._prompt_scores:
            body["prompt_logprobs"] = self._prompt_scores.prompt(answers[0].prompt_ids, answers[0].prompt_scores)
        return body

    def opening(self, choices: int) -> list[Body]:
        return [_chat_chunk(index, {"role": "assistant", "content": ""}) for index in range(choices)]

    def chunks(self, delta: Delta) -> list[Body]:
        chunks = []
        if delta.text or delta.scored:
            logprobs = self._scores.chat(delta.scored) if self._scores and delta.scored else None
            chunks.append(_chat_chunk(delta.index, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            chunks.append(_chat_chunk(delta.index, {}, None, delta.finish_reason, delta.stop_reason))
        return chunks

    def _whole_choice(self, index: int, answer: Answer) -> Body:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._scores.chat(answer.scored) if self._scores else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }


def usage_body(usage: Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _prompt_forms(request: GenerationRequest, token_bytes: TokenBytes) -> ScoreForms | None:
    return None if request.prompt_logprobs is None else ScoreForms(token_bytes, request.prompt_logprobs)


def _text_choice(
    index: int, text: str, logprobs: Body | None, finish_reason: str | None, stop_reason: str | int | None
) -> Body:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def _chat_chunk(
    index: int,
    delta: Mapping[str, str],
    logprobs: Body | None = None,
    finish_reason: str | None = None,
    stop_reason: str | int | None = None,
) -> Body:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
