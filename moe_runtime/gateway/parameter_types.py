"""Types of request fields whose form is more than a number's range: each parses strictly and describes itself."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from moe_runtime.gateway.fields import value_error

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 128
MAX_BAD_WORDS = 256
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_BIAS = 100.0


def _parse_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops[: MAX_STOPS + 1]):
        raise value_error("must be a string or a list of strings")
    return _texts(stops, MAX_STOPS, "stop strings")


def _parse_bad_words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value[: MAX_BAD_WORDS + 1]):
        raise value_error("must be a list of strings")
    return _texts(value, MAX_BAD_WORDS, "words")


def _texts(texts: list[str], most: int, what: str) -> tuple[str, ...]:
    if len(texts) > most:
        raise value_error(f"at most {most} {what} are allowed, got {len(texts)}")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in texts):
        raise value_error(f"each must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(texts)


def _parse_prompt(value: Any) -> tuple[str | list[int], ...]:
    """Strings, token ids, or lists of either, always as a list of prompts."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list):
        raise value_error("must be a string, a list of token ids, or a list of either")
    if not prompts:
        raise value_error("must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise value_error(f"at most {MAX_PROMPTS} prompts are allowed, got {len(prompts)}")
    if not all(isinstance(prompt, str) for prompt in prompts) and not all(_is_ids(prompt) for prompt in prompts):
        raise value_error("must be a string, a list of token ids, or a list of either, none of them empty")
    if any(len(prompt) == 0 for prompt in prompts):
        raise value_error("must not be empty")
    return tuple(prompts)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _parse_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise value_error("must be a list of token ids")
    return tuple(value)


def _parse_bias(value: Any) -> dict[int, float]:
    """JSON has only strings as keys, so token ids come as decimal text."""
    if not isinstance(value, dict):
        raise value_error("must be an object from token id to bias")
    if len(value) > MAX_BIASES:
        raise value_error(f"at most {MAX_BIASES} biases are allowed, got {len(value)}")
    biases = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise value_error('each key must be a token id, such as "50256"')
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise value_error(f"each bias must be a number from -{MAX_BIAS:g} to {MAX_BIAS:g}")
        if int(token) in biases:
            raise value_error(f"token id {int(token)} is given twice")
        biases[int(token)] = float(bias)
    return biases


def _parse_whole(value: Any) -> int:
    """-1 for all, or a count."""
    if type(value) is not int or (value < 1 and value != -1):
        raise value_error("must be -1 (all) or an integer of at least 1")
    return value


def _few_stop_tokens(ids: tuple[int, ...]) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKENS:
        raise value_error(f"at most {MAX_STOP_TOKENS} token ids are allowed, got {len(ids)}")
    return ids


def _distinct(ids: tuple[int, ...]) -> tuple[int, ...]:
    if not ids:
        raise value_error("must not be empty: nothing could be generated")
    return tuple(dict.fromkeys(ids))


_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP_SCHEMA = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}]}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _IDS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_BIAS_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
}

Stop = Annotated[tuple[str, ...], PlainValidator(_parse_stop), WithJsonSchema(_STOP_SCHEMA)]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_bad_words),
    WithJsonSchema({"type": "array", "items": _TEXT, "maxItems": MAX_BAD_WORDS}),
]
Prompts = Annotated[tuple[str | list[int], ...], PlainValidator(_parse_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_parse_ids), WithJsonSchema({**_IDS, "minItems": 0})]
StopTokens = Annotated[
    TokenIds, AfterValidator(_few_stop_tokens), WithJsonSchema({**_IDS, "minItems": 0, "maxItems": MAX_STOP_TOKENS})
]
AllowedTokens = Annotated[TokenIds, AfterValidator(_distinct), WithJsonSchema(_IDS)]
LogitBias = Annotated[dict[int, float], PlainValidator(_parse_bias), WithJsonSchema(_BIAS_SCHEMA)]
CountOrAll = Annotated[
    int, PlainValidator(_parse_whole), WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]})
]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
