"""The connection to one OpenAI-compatible server."""

import asyncio
import ipaddress
from typing import Any
from urllib.parse import urlsplit

import msgspec
import openai

from moe_runtime.terminal.answer import Answer
from moe_runtime.terminal.faults import CONNECT_TIMEOUT_S, ServerError, explained
from moe_runtime.terminal.fields import Fields
from moe_runtime.terminal.target import Target

Message = dict[str, str]


class ModelCard(msgspec.Struct, frozen=True):
    id: str


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]


class Client:
    """Asks one thing at a time. Connecting is bounded by CONNECT_TIMEOUT_S, each later wait by target.timeout_s."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._model = target.model
        self._server = openai.AsyncOpenAI(
            base_url=target.url,
            # The openai client insists on a key; servers that want none do not look at it.
            api_key=target.key or "none",
            max_retries=0,
            # Reads are bounded around each event, so that a server's keep-alive comments do not count as a sign of it.
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT_S),
            # A proxy cannot reach this machine's own loopback address.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not _is_loopback(target.url)),
        )

    async def model(self) -> str:
        """The model that answers: the target's, else the server's first. Raises ServerError."""
        if self._model is None:
            with explained(self.target, in_answer=False):
                async with asyncio.timeout(self.target.timeout_s):
                    body = await self._server.get("/models", cast_to=object)
                models = msgspec.convert(body, ModelList).data
            if not models:
                raise ServerError(f"{self.target.url} serves no model; name one with --model")
            self._model = models[0].id
        return self._model

    def chat(self, messages: list[Message], fields: Fields) -> Answer:
        """The answer to a conversation. The request is sent when the answer is iterated."""
        return Answer(lambda: self._send("/chat/completions", {"messages": messages}, fields), self.target)

    def complete(self, prompt: str, fields: Fields) -> Answer:
        """The text after a prompt, likewise."""
        return Answer(lambda: self._send("/completions", {"prompt": prompt}, fields), self.target)

    async def aclose(self) -> None:
        await self._server.close()

    async def _send(self, path: str, content: Fields, fields: Fields) -> openai.AsyncStream[object]:
        body: dict[str, Any] = {"model": await self.model(), **content, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **fields}
        body = {name: value for name, value in body.items() if value is not None}
        try:
            async with asyncio.timeout(self.target.timeout_s):
                return await self._server.post(
                    path, cast_to=object, body=body, stream=True, stream_cls=openai.AsyncStream[object]
                )
        except openai.NotFoundError:
            # The server may have been started anew with another model.
            self._model = self.target.model
            raise


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
