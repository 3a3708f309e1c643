"""From a request's text to token ids and back, away from the event loop when it is long."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Encoding

from moe_runtime.gateway.errors import ApiError, invalid
from moe_runtime.gateway.offload import is_long
from moe_runtime.gateway.sampling import Limits, prompt_too_long
from moe_runtime.gateway.schema import ChatRequest, CompletionRequest, Conversation, GenerationRequest
from moe_runtime.gateway.template_variables import check_variables
from moe_runtime.gateway.token_schema import TokenizeChatRequest, TokenizeTextRequest
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
    """Prompts and conversations as token ids, in threads of its own.

    Every method raises ApiError 400 for what cannot be done, and 429 if too many long texts are waiting.
    """

    def __init__(self, tokenizer: TextTokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._waiting = 0

    async def completion(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        """One list of ids per prompt. Refuses ids outside the vocabulary, and prompts that have none or too many."""
        size = sum(map(len, request.prompt))
        return await self._offload(size, lambda: [self._prompt(prompt, request) for prompt in request.prompt])

    async def chat(self, request: ChatRequest) -> tuple[int, ...]:
        """The conversation through the model's template. Refuses what the template refuses, and what is too long."""

        return await self._offload(_size(request), lambda: self._ids(self._conversation(request), "messages", request))

    async def tokenize(self, request: TokenizeTextRequest | TokenizeChatRequest) -> list[int]:
        """The same ids, however many."""
        if isinstance(request, TokenizeChatRequest):
            return await self._offload(_size(request), lambda: self._conversation(request).ids)
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

    def _prompt(self, prompt: str | list[int], request: CompletionRequest) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._ids(self._tokenizer.encoding(prompt, request.add_special_tokens), "prompt", request)
        return self._ids(prompt, "prompt", request)

    def _ids(self, source: Encoding | list[int], field: str, request: GenerationRequest) -> tuple[int, ...]:
        count = len(source)
        if count == 0:
            raise invalid(f"{field}: no tokens are left of it", field)
        if count > self._limits.capacity and request.truncate_prompt_tokens is None:
            raise prompt_too_long(count, self._limits, field)
        ids = source if isinstance(source, list) else source.ids
        self._check_vocabulary(ids, field)
        return tuple(ids)

    def _conversation(self, request: Conversation) -> Encoding:
        check_variables(request.chat_template_kwargs)
        text = self._tokenizer.render(
            [{"role": message.role, "content": message.text} for message in request.messages],
            request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
        )
        return self._tokenizer.encoding(text, request.add_special_tokens)

    def _check_vocabulary(self, ids: Sequence[int], field: str) -> None:
        vocab = self._limits.vocab
        for start in range(0, len(ids), _CHUNK):
            part = ids[start : start + _CHUNK]
            for wrong in (min(part), max(part)):
                if not 0 <= wrong < vocab:
                    raise invalid(f"{field}: token id {wrong} is outside the vocabulary 0..{vocab - 1}", field)

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


def _size(request: Conversation) -> int:
    """About how many characters' work a conversation is, counted no further than needed to call it long."""
    size = 0
    for message in request.messages:
        for part in message.content:
            size += _CHARS_PER_MESSAGE + len(part.text)
            if is_long(size):
                return size
    return size
