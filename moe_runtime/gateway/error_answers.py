"""Every error leaves in one form: {"error": {message, type, param, code}}."""

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from moe_runtime.gateway.errors import ApiError, ClientGoneError, own_fault


def error_answer(error: ApiError) -> Response:
    """The response that says it."""
    return JSONResponse(error.body(), error.status, error.headers)


def add_error_answers(app: FastAPI) -> None:
    """Our own errors, the framework's (404, 405), clients that left, and bugs."""

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> Response:
        return error_answer(error)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_request: Request, _error: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:80]}: {error.detail}"
        return error_answer(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def bug(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again once this has been sent, so that the server logs it.
        return error_answer(own_fault())
