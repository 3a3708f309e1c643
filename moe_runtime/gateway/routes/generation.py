"""/v1/completions and /v1/chat/completions."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from moe_runtime.gateway.body import parse_body
from moe_runtime.gateway.schema import ChatRequest, CompletionRequest
from moe_runtime.gateway.service import Service

Body = TypeVar("Body", CompletionRequest, ChatRequest)


def generation_routes(service: Service) -> APIRouter:
    """Text for prompts and for conversations."""
    router = APIRouter()

    async def generate(
        request: Request, kind: type[Body], answer: Callable[[Request, Body, float], Awaitable[Response]]
    ) -> Response:
        arrived = time.perf_counter()
        return await answer(request, await parse_body(request, service, lambda _: kind), arrived)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, CompletionRequest, service.complete)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, ChatRequest, service.chat)

    return router
