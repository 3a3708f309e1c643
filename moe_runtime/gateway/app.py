"""The HTTP surface over a running service, put together from its parts."""

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from moe_runtime.gateway.api_document import OPERATIONS, api_document
from moe_runtime.gateway.auth import ApiKeys, RequireKey
from moe_runtime.gateway.error_answers import add_error_answers
from moe_runtime.gateway.request_ids import RequestIds
from moe_runtime.gateway.routes.generation import generation_routes
from moe_runtime.gateway.routes.models import model_routes
from moe_runtime.gateway.routes.state import state_routes
from moe_runtime.gateway.routes.tokens import token_routes
from moe_runtime.gateway.service import Service


def create_app(service: Service, keys: ApiKeys | None) -> ASGIApp:
    """From the outside in: request ids, API keys where there are any, routes."""
    # Bodies are checked by this project, so the document is its own too. A redirect to a path without its last slash
    # would be an answer that no client of an API expects.
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    routers = (
        generation_routes(service),
        model_routes(service),
        token_routes(service),
        state_routes(service, api_document(service.models, keys is not None)),
    )
    _check_documented(routers)
    for router in routers:
        app.include_router(router)
    add_error_answers(app)
    return RequestIds(app if keys is None else RequireKey(app, keys), service.metrics.answered)


def _check_documented(routers: Sequence[APIRouter]) -> None:
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    served = {(method.lower(), route.path_format) for route in routes for method in route.methods or ()}
    documented = {(operation.method, operation.path) for operation in OPERATIONS}
    assert served == documented, f"routes and document differ: {served ^ documented}"
