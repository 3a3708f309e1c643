"""The routes, and the form in which every error leaves."""

import logging
import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from moe_runtime.gateway.body import parse_body
from moe_runtime.gateway.errors import ApiError, ClientGoneError
from moe_runtime.gateway.schema import BODIES, ChatRequest, CompletionRequest
from moe_runtime.gateway.service import Service

logger = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The whole HTTP surface over a running service. The document at /openapi.json lists every accepted field."""
    app = FastAPI(title="moe-runtime", docs_url=None, redoc_url=None)
    _add_generation(app, service)
    _add_models(app, service)
    _add_state(app, service)
    _add_errors(app)
    _describe_bodies(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=_body_of("CompletionRequest"))
    async def completions(request: Request) -> Response:
        arrived = time.perf_counter()
        body = await parse_body(request, CompletionRequest, service.max_body_bytes)
        return await service.complete(request, body, arrived)

    @app.post("/v1/chat/completions", openapi_extra=_body_of("ChatRequest"))
    async def chat_completions(request: Request) -> Response:
        arrived = time.perf_counter()
        body = await parse_body(request, ChatRequest, service.max_body_bytes)
        return await service.chat(request, body, arrived)


def _add_models(app: FastAPI, service: Service) -> None:
    card = {"id": service.model, "object": "model", "created": service.created, "owned_by": "moe-runtime"}
    card["max_model_len"] = service.limits.capacity

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> dict[str, Any]:
        if model != service.model:
            raise ApiError(404, f"the model {model[:80]!r} does not exist", "model", "model_not_found")
        return card


def _add_state(app: FastAPI, service: Service) -> None:
    def state(trouble: str | None) -> Response:
        if trouble is not None:
            return _error_response(ApiError(503, trouble, code="not_ready"))
        return JSONResponse({"status": "ok"})

    @app.get("/health")
    async def health() -> Response:
        return state(service.ill())

    @app.get("/ready")
    async def ready() -> Response:
        return state("the server is shutting down" if service.draining else service.ill())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> Response:
        return _error_response(error)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_request: Request, _error: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:80]}: {error.detail}"
        response = _error_response(ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def bug(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again once this has been sent, so that the server logs it.
        return _error_response(ApiError(500, "an error inside the gateway; its log has the details", code="internal"))


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


def _body_of(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe_bodies(app: FastAPI) -> None:
    """Bodies are parsed here and not by FastAPI, so its document must be told of them."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, schemas = models_json_schema(
            [(model, "validation") for model in BODIES], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
