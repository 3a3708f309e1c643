"""The bodies of both endpoints, whole and in chunks, in OpenAI's forms."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moe_runtime.gateway.generation import Delta, Usage

Body = dict[str, Any]


class Form(Protocol):
    """How one endpoint writes its answers. `prompt_field` names the request's prompt in error messages."""

    id: str
    prompt_field: str

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Usage) -> Body:
        """The answer of a request without stream."""

    def opening(self, choices: int) -> list[Body]:
        """The chunks before any text."""

    def chunks(self, delta: Delta) -> list[Body]:
        """The chunks of one delta; exactly one in a stream has a choice's finish_reason."""

    def closing(self, usage: Usage) -> Body:
        """The chunk with the usage and no choices."""


class CompletionForm:
    """/v1/completions. with_usage: chunks show `usage: null` until the last one gives it."""

    prompt_field = "prompt"

    def __init__(self, model: str, with_usage: bool) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._no_usage = {"usage": None} if with_usage else {}

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Usage) -> Body:
        pairs = enumerate(zip(texts, reasons, strict=True))
        choices = [_text_choice(index, text, reason) for index, (text, reason) in pairs]
        return {**self._head, "choices": choices, "usage": _usage(usage)}

    def opening(self, choices: int) -> list[Body]:
        return []

    def chunks(self, delta: Delta) -> list[Body]:
        choice = _text_choice(delta.index, delta.text, delta.finish_reason)
        return [{**self._head, "choices": [choice], **self._no_usage}]

    def closing(self, usage: Usage) -> Body:
        return {**self._head, "choices": [], "usage": _usage(usage)}


class ChatForm:
    """/v1/chat/completions; see CompletionForm."""

    prompt_field = "messages"

    def __init__(self, model: str, with_usage: bool) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._shared = {"id": self.id, "created": int(time.time()), "model": model}
        self._head = {**self._shared, "object": "chat.completion.chunk"}
        self._no_usage = {"usage": None} if with_usage else {}

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Usage) -> Body:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._shared, "object": "chat.completion", "choices": choices, "usage": _usage(usage)}

    def opening(self, choices: int) -> list[Body]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(choices)]

    def chunks(self, delta: Delta) -> list[Body]:
        chunks = [self._chunk(delta.index, {"content": delta.text}, None)] if delta.text else []
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, {}, delta.finish_reason))
        return chunks

    def closing(self, usage: Usage) -> Body:
        return {**self._head, "choices": [], "usage": _usage(usage)}

    def _chunk(self, index: int, delta: Mapping[str, str], reason: str | None) -> Body:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "choices": [choice], **self._no_usage}


def _text_choice(index: int, text: str, reason: str | None) -> Body:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _usage(usage: Usage) -> Body:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
