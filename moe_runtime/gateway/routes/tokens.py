"""/tokenize and /detokenize: what the model sees of a text, and back."""

from fastapi import APIRouter, Request, Response

from moe_runtime.gateway.body import parse_body
from moe_runtime.gateway.json_answer import json_answer
from moe_runtime.gateway.service import Service
from moe_runtime.gateway.token_schema import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, tokenize_form


def token_routes(service: Service) -> APIRouter:
    """They work while the server shuts down too: no node is needed."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body: TokenizeTextRequest | TokenizeChatRequest = await parse_body(request, service, tokenize_form)
        service.resolve_model(body.model)
        tokens = await service.encoder.tokenize(body)
        strings = await service.encoder.token_strings(tokens) if body.return_token_strs else None
        answer = {
            "count": len(tokens),
            "max_model_len": service.limits.capacity,
            "tokens": tokens,
            "token_strs": strings,
        }
        return await json_answer(answer, len(tokens))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await parse_body(request, service, lambda _: DetokenizeRequest)
        service.resolve_model(body.model)
        text = await service.encoder.decode(body.tokens)
        return await json_answer({"prompt": text}, len(text))

    return router
