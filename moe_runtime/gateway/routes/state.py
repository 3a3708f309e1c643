"""How the server is, and what it can do: /health, /ready, /metrics, /version, /openapi.json; all without an API key."""

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from moe_runtime.gateway.api_document import VERSION, Json
from moe_runtime.gateway.errors import ApiError
from moe_runtime.gateway.service import Service


def state_routes(service: Service, document: Json) -> APIRouter:
    """Health is the cluster's; readiness is also this gateway's own, which ends when it is told to stop."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return _state(service.ill())

    @router.get("/ready")
    async def ready() -> Response:
        return _state("the server is shutting down" if service.draining else service.ill())

    @router.get("/metrics")
    async def metrics() -> Response:
        # Thousands of samples in a model of many experts.
        text = await asyncio.to_thread(service.metrics.render)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": VERSION})

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(document)

    return router


def _state(trouble: str | None) -> Response:
    if trouble is not None:
        raise ApiError(503, trouble, code="not_ready")
    return JSONResponse({"status": "ok"})
