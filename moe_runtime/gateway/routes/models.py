"""/v1/models: the names under which clients know the model."""

from typing import Any

from fastapi import APIRouter, Request

from moe_runtime.gateway.errors import ApiError, shorten
from moe_runtime.gateway.service import Service


def model_routes(service: Service) -> APIRouter:
    """The list of models, and each by its name, which may hold any characters."""
    router = APIRouter()
    cards = {name: _card(name, service) for name in service.models}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(cards.values())}

    @router.get("/v1/models/{model:path}")
    async def model_card(request: Request) -> dict[str, Any]:
        name = request.path_params["model"]
        if name not in cards:
            raise ApiError(404, f"the model {shorten(name)} does not exist", "model", "model_not_found")
        return cards[name]

    return router


def _card(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "moe-runtime",
        "root": service.model,
        "parent": None,
        "max_model_len": service.limits.capacity,
    }
