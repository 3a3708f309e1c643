"""Long work runs beside the event loop: each piece here waits for a signal that only a free loop can give."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moe_runtime.gateway import body as body_module
from moe_runtime.gateway.body import parse_body
from moe_runtime.gateway.errors import ApiError
from moe_runtime.gateway.prompts import PromptEncoder
from moe_runtime.gateway.sampling import Limits
from moe_runtime.gateway.schema import ChatRequest, CompletionRequest
from moe_runtime.gateway.token_schema import TokenizeChatRequest, TokenizeTextRequest

WAIT_S = 5.0
LIMITS = Limits(10**9, 1, 300, ())


class PatientTokenizer:
    """Every method waits for `released`, which nobody can set while the event loop waits for the method."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def wait(*_: Any, **__: Any) -> Any:
            assert self.released.wait(WAIT_S), f"{name} holds up the event loop"
            return "text" if name in ("render", "decode") else Ids([1])

        return wait


class Ids(list[int]):
    """Ids, and an encoding of them."""

    @property
    def ids(self) -> list[int]:
        return self


@pytest.fixture
def tokenizer() -> PatientTokenizer:
    return PatientTokenizer()


@pytest.fixture
def encoder(tokenizer: PatientTokenizer) -> Iterator[PromptEncoder]:
    encoder = PromptEncoder(tokenizer, LIMITS)  # type: ignore[arg-type]
    yield encoder
    encoder.close()


LONG = "x" * 2000
MESSAGES = [{"role": "user", "content": ""}] * 100
WORK: dict[str, Callable[[PromptEncoder], Awaitable[Any]]] = {
    "a long prompt": lambda encoder: encoder.completion(CompletionRequest(prompt=LONG)),
    "many short prompts": lambda encoder: encoder.completion(CompletionRequest(prompt=["x" * 20] * 100)),
    "a long message": lambda encoder: encoder.chat(ChatRequest(messages=[{"role": "user", "content": LONG}])),
    "many empty messages": lambda encoder: encoder.chat(ChatRequest(messages=MESSAGES)),
    "tokenize a text": lambda encoder: encoder.tokenize(TokenizeTextRequest(prompt=LONG)),
    "tokenize messages": lambda encoder: encoder.tokenize(TokenizeChatRequest(messages=MESSAGES)),
    "token_strs": lambda encoder: encoder.token_strings([1] * 2000),
    "detokenize": lambda encoder: encoder.decode([1] * 2000),
}


@pytest.mark.parametrize("name", WORK)
def test_text_work(encoder: PromptEncoder, tokenizer: PatientTokenizer, name: str) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(WORK[name](encoder))
        await asyncio.sleep(0)
        tokenizer.released.set()
        await task

    asyncio.run(main())


def test_more_long_texts_than_may_wait_are_refused(encoder: PromptEncoder, tokenizer: PatientTokenizer) -> None:
    async def main() -> list[Any]:
        request = TokenizeTextRequest(prompt=LONG)
        tasks = [asyncio.create_task(encoder.tokenize(request)) for _ in range(300)]
        await asyncio.sleep(0)
        tokenizer.released.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert await encoder.tokenize(request) == [1], "there is room again"
        return done

    done = asyncio.run(main())
    refused = [error for error in done if isinstance(error, ApiError)]
    assert len(refused) == 300 - 256 and {error.status for error in refused} == {429}
    assert all(result == [1] for result in done if not isinstance(result, ApiError))


def test_a_large_body(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    released = threading.Event()
    parse = body_module.from_json

    def patient(*arguments: Any, **options: Any) -> Any:
        assert released.wait(WAIT_S), "parsing holds up the event loop"
        return parse(*arguments, **options)

    async def stream() -> Any:
        yield content

    async def main() -> None:
        service: Any = SimpleNamespace(max_body_bytes=10**6, request_timeout_s=60.0)
        request: Any = SimpleNamespace(headers={"content-type": "application/json"}, stream=stream)
        task = asyncio.create_task(parse_body(request, service, lambda _: CompletionRequest))
        await asyncio.sleep(0)
        released.set()
        assert (await task).prompt == ("x" * 100_000,)

    monkeypatch.setattr(body_module, "from_json", patient)
    asyncio.run(main())
