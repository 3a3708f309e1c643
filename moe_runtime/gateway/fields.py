"""The base of every request model: unknown fields are refused by name, and so are known ones that are not built yet."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from moe_runtime.gateway.errors import ApiError, invalid


class RequestModel(BaseModel):
    """Strict types, no unknown fields; null means the default. Field names never contain a value from the client.

    not_yet: fields of OpenAI or vLLM that this server does not do, each with the values that ask for nothing (null
    always does); only those are accepted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name not in cls.not_yet:
                raise field_error(name, f"unknown field{_hint(name, cls)}")
            elif value is not None and not any(_same(value, neutral) for neutral in cls.not_yet[name]):
                raise field_error(name, "this server does not support this field yet")
        return kept

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """What _check_names adds to the fields' own types: null for every field that has a default, and not_yet."""
        described = handler(core_schema)
        schema = handler.resolve_ref_schema(described)
        properties = schema["properties"]
        for name in properties.keys() - schema.get("required", ()):
            properties[name] = _or_null(properties[name])
        for name, neutral in cls.not_yet.items():
            properties[name] = {"enum": [None, *neutral], "description": "Not supported yet."}
        return described


def to_api_error(error: ValidationError) -> ApiError:
    """The first fault as a 400 that names its field, such as `messages[0].content`."""
    fault = error.errors(include_url=False, include_input=False)[0]
    places = (*fault["loc"], *((fault["ctx"]["field"],) if "field" in fault.get("ctx", {}) else ()))
    param = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in places).lstrip(".")
    return invalid(f"{param or 'the body'}: {fault['msg']}", param or None)


def value_error(message: str) -> PydanticCustomError:
    """A fault with exactly this message, for validators of one field."""
    return PydanticCustomError("value", "{message}", {"message": message})


def field_error(name: str, message: str) -> PydanticCustomError:
    """A fault of the named field, for validators that see a whole body."""
    return PydanticCustomError("name", "{message}", {"message": message, "field": name[:80]})


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    notes: JsonSchemaValue = {key: schema.pop(key) for key in ("default", "title") if key in schema}
    return {"anyOf": [schema, {"type": "null"}], **notes}


def _hint(name: str, model: type[BaseModel]) -> str:
    near = difflib.get_close_matches(name[:80], model.model_fields, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _same(value: object, neutral: object) -> bool:
    """Equality as JSON has it: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
