"""From a request's text to token ids and back, away from the event loop when it is long."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moe_runtime.gateway.errors import ApiError, invalid
from moe_runtime.gateway.offload import is_long
from moe_runtime.gateway.schema import CompletionRequest, Conversation
from moe_runtime.gateway.template_variables import check_variables
from moe_runtime.gateway.token_schema import TokenizeTextRequest
from moe_runtime.gateway.tokenizer import TextTokenizer

Result = TypeVar("Result")

_THREADS = 2
# Long texts that may wait for a thread. A megabyte takes about half a second.
_MAX_WAITING = 256
# A message costs about as much to render as so many characters.
_CHARS_PER_MESSAGE = 64
# A chunk of ids to look through in one go: nothing else in the process runs meanwhile.
_CHUNK = 65536


class PromptEncoder:
    """Prompts and conversations as token ids, in threads of its own. vocab: the model's, which bounds clients' ids.

    Every method raises ApiError 400 for what cannot be done, and 429 if too many long texts are waiting.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._waiting = 0

    async def completion(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        """One list of ids per prompt. Refuses ids outside the vocabulary and prompts without tokens."""
        size = sum(map(len, request.prompt))
        return await self._offload(
            size, lambda: [self._prompt(prompt, request.add_special_tokens) for prompt in request.prompt]
        )

    async def chat(self, request: Conversation) -> tuple[int, ...]:
        """The conversation through the model's template. Refuses what the template refuses."""
        ids = await self._conversation(request)
        if not ids:
            raise invalid("messages: the chat template makes no tokens of them", "messages")
        return tuple(ids)

    async def tokenize(self, request: TokenizeTextRequest | Conversation) -> list[int]:
        """The same ids, and none where there are none."""
        if isinstance(request, Conversation):
            return await self._conversation(request)
        prompt, special_tokens = request.prompt, request.add_special_tokens
        return await self._offload(len(prompt), lambda: self._tokenizer.encode(prompt, special_tokens))

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return await self._offload(len(ids), lambda: self._tokenizer.spellings(ids))

    async def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens' text included. Refuses ids outside the vocabulary."""

        def work() -> str:
            self._check_vocabulary(ids, "tokens")
            return self._tokenizer.decode(list(ids), skip_special=False)

        return await self._offload(len(ids), work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prompt(self, prompt: str | list[int], special_tokens: bool) -> tuple[int, ...]:
        ids = self._tokenizer.encode(prompt, special_tokens) if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid("prompt: no tokens are left of it", "prompt")
        self._check_vocabulary(ids, "prompt")
        return tuple(ids)

    def _check_vocabulary(self, ids: Sequence[int], field: str) -> None:
        for start in range(0, len(ids), _CHUNK):
            part = ids[start : start + _CHUNK]
            for wrong in (min(part), max(part)):
                if not 0 <= wrong < self._vocab:
                    message = f"{field}: token id {wrong} is outside the vocabulary 0..{self._vocab - 1}"
                    raise invalid(message, field)

    async def _conversation(self, request: Conversation) -> list[int]:
        check_variables(request.chat_template_kwargs)
        messages = [{"role": message.role, "content": message.text} for message in request.messages]
        size = sum(len(message["content"]) + _CHARS_PER_MESSAGE for message in messages)
        generation = request.add_generation_prompt and not request.continue_final_message

        def work() -> list[int]:
            text = self._tokenizer.render(
                messages, request.chat_template_kwargs, generation, request.continue_final_message
            )
            return self._tokenizer.encode(text, request.add_special_tokens)

        return await self._offload(size, work)

    async def _offload(self, size: int, work: Callable[[], Result]) -> Result:
        if not is_long(size):
            return work()
        if self._waiting >= _MAX_WAITING:
            raise ApiError(429, f"{self._waiting} long texts are waiting to be tokenized", code="overloaded")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1
