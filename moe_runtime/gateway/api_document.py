"""The OpenAPI document: every route with what it takes and every answer it can give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moe_runtime.gateway import answer_schema as answers
from moe_runtime.gateway.auth import OPEN_PATHS
from moe_runtime.gateway.request_ids import PATTERN
from moe_runtime.gateway.schema import ChatRequest, CompletionRequest
from moe_runtime.gateway.token_schema import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

Json = dict[str, Any]

VERSION = version("moe-runtime")

# Any request may have a bad X-Request-Id or a head that is too large, or meet a bug.
_ANY = (400, 431, 500)
_BODY = (408, 413, 415)


@dataclass(frozen=True)
class Operation:
    """One method of one path. events: the model of a chunk, where the answer may be streamed.

    answer: a model, or the content type of an answer that is no JSON; errors: the statuses beside 200, _ANY and 401.
    """

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | str
    errors: Sequence[int] = ()
    bodies: Sequence[type[BaseModel]] = ()
    events: type[BaseModel] | None = None


OPERATIONS = (
    Operation(
        method="post",
        path="/v1/completions",
        summary="Text that follows a prompt",
        answer=answers.TextCompletion,
        errors=(404, *_BODY, 429, 503),
        bodies=(CompletionRequest,),
        events=answers.TextCompletionChunk,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="The next message of a conversation",
        answer=answers.ChatCompletion,
        errors=(404, *_BODY, 429, 503),
        bodies=(ChatRequest,),
        events=answers.ChatCompletionChunk,
    ),
    Operation(method="get", path="/v1/models", summary="The model's names", answer=answers.ModelList),
    Operation(
        method="get",
        path="/v1/models/{model}",
        summary="The model by one of its names",
        answer=answers.ModelCard,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="The tokens of a text or a conversation",
        answer=answers.Tokens,
        errors=(404, *_BODY, 429),
        bodies=(TokenizeTextRequest, TokenizeChatRequest),
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="The text of tokens",
        answer=answers.Text,
        errors=(404, *_BODY, 429),
        bodies=(DetokenizeRequest,),
    ),
    Operation(method="get", path="/health", summary="Is the cluster well?", answer=answers.State, errors=(503,)),
    Operation(method="get", path="/ready", summary="Are requests welcome?", answer=answers.State, errors=(503,)),
    Operation(
        method="get", path="/metrics", summary="Metrics, in Prometheus's text format", answer=CONTENT_TYPE_LATEST
    ),
    Operation(method="get", path="/version", summary="The server's version", answer=answers.Version),
    Operation(method="get", path="/openapi.json", summary="This document", answer="application/json"),
)

_REQUEST_ID = {
    "description": "Names the request in the answer's header and in the server's log; made up if it is not given.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": f"^{PATTERN}$"},
}


def api_document(models: Sequence[str], with_keys: bool) -> Json:
    """models: the served names; with_keys: whether the routes beside OPEN_PATHS need an API key."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        secured = with_keys and operation.path not in OPEN_PATHS
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, secured, models)
    components: Json = {"schemas": _schemas()}
    if with_keys:
        components["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "moe-runtime", "version": VERSION}
    # 3.2 is the first version that can describe the events of a stream.
    return {"openapi": "3.2.0", "info": info, "paths": paths, "components": components}


def _operation(operation: Operation, secured: bool, models: Sequence[str]) -> Json:
    statuses = sorted({*_ANY, *operation.errors, *((401,) if secured else ())})
    parameters: list[Json] = [{"name": "X-Request-Id", "in": "header", "required": False, **_REQUEST_ID}]
    if "{model}" in operation.path:
        named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        parameters.append({**named, "examples": {name: {"value": name} for name in models}})
    document: Json = {
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {"200": _success(operation), **{str(status): _error(status) for status in statuses}},
    }
    if operation.bodies:
        document["requestBody"] = {"required": True, "content": _json_content(*operation.bodies)}
    if secured:
        document["security"] = [{"api_key": []}]
    return document


def _success(operation: Operation) -> Json:
    if isinstance(operation.answer, str):
        schema = {"type": "object"} if operation.answer == "application/json" else {"type": "string"}
        content: Json = {operation.answer: {"schema": schema}}
    else:
        content = _json_content(operation.answer)
    if operation.events is not None:
        content["text/event-stream"] = {"itemSchema": _event(operation.events)}
    return {"description": operation.summary, "headers": _headers(), "content": content}


def _event(chunk: type[BaseModel]) -> Json:
    """Server-sent events: chunks, then [DONE]; or, where the text breaks off, an error as the last one."""
    models = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in (chunk, answers.Error)]
    content = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": models}}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, content]}}}


def _error(status: int) -> Json:
    later = {"Retry-After": {"schema": {"type": "integer"}, "required": True}} if status in (429, 503) else {}
    challenge = {"WWW-Authenticate": {"schema": {"const": "Bearer"}, "required": True}} if status == 401 else {}
    headers = {**_headers(), **later, **challenge}
    return {"description": HTTPStatus(status).phrase, "headers": headers, "content": _json_content(answers.Error)}


def _headers() -> Json:
    return {"X-Request-Id": {**_REQUEST_ID, "required": True}}


def _json_content(*models: type[BaseModel]) -> Json:
    schemas = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"oneOf": schemas}}}


def _schemas() -> Mapping[str, Any]:
    requests = [(model, "validation") for operation in OPERATIONS for model in operation.bodies]
    replies = [
        (model, "serialization")
        for operation in OPERATIONS
        for model in (operation.answer, operation.events, answers.Error)
        if isinstance(model, type)
    ]
    _, schemas = models_json_schema(
        [*dict.fromkeys(requests), *dict.fromkeys(replies)],  # type: ignore[list-item]
        ref_template="#/components/schemas/{model}",
    )
    return schemas["$defs"]
