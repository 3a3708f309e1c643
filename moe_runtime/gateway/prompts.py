"""From a request's text to token ids, away from the event loop when it is long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moe_runtime.gateway.errors import invalid
from moe_runtime.gateway.schema import ChatRequest, CompletionRequest
from moe_runtime.gateway.tokenizer import TextTokenizer

Result = TypeVar("Result")

# Text of this length takes about as long to tokenize as a hop to another thread and back.
_INLINE_CHARS = 1024
_THREADS = 2


class PromptEncoder:
    """Prompts and conversations as token ids. vocab: the model's, which bounds ids that clients send."""

    def __init__(self, tokenizer: TextTokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def completion(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        """One list of ids per prompt. Raises ApiError 400 for ids outside the vocabulary and prompts without tokens."""
        prompts = [await self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]
        for prompt in prompts:
            if not prompt:
                raise invalid("prompt: no tokens are left of it", "prompt")
            if not 0 <= min(prompt) <= max(prompt) < self._vocab:
                wrong = min(prompt) if min(prompt) < 0 else max(prompt)
                raise invalid(f"prompt: token id {wrong} is outside the vocabulary 0..{self._vocab - 1}", "prompt")
        return [tuple(prompt) for prompt in prompts]

    async def chat(self, request: ChatRequest) -> tuple[int, ...]:
        """The conversation through the model's template. Raises ApiError 400 if the template refuses it."""
        messages = [{"role": message.role, "content": message.text} for message in request.messages]
        size = sum(len(message["content"]) for message in messages)
        return await self._offload(size, lambda: self._conversation(messages))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _conversation(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        # The template writes the special tokens itself.
        ids = self._tokenizer.encode(self._tokenizer.render(messages), special_tokens=False)
        if not ids:
            raise invalid("messages: the chat template makes no tokens of them", "messages")
        return tuple(ids)

    async def _encode(self, text: str) -> list[int]:
        return await self._offload(len(text), lambda: self._tokenizer.encode(text, special_tokens=True))

    async def _offload(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
