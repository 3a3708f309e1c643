"""The two request bodies of OpenAI's API, with the fields and ranges that this server honours."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, WithJsonSchema

from moe_runtime.gateway.fields import RequestModel, value_error

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 128
MAX_MESSAGES = 4096

# Values that ask for nothing. Where a number has its neutral value, sending it changes no text.
_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "metadata": ({},),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "structured_outputs": (),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def _parse_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops[: MAX_STOPS + 1]):
        raise value_error("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise value_error(f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise value_error(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


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


_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STOP_SCHEMA = {"anyOf": [{"type": "string", "minLength": 1}, {**_STRINGS, "maxItems": MAX_STOPS}]}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _IDS,
        {**_STRINGS, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
Stop = Annotated[tuple[str, ...], PlainValidator(_parse_stop), WithJsonSchema(_STOP_SCHEMA)]
Prompts = Annotated[tuple[str | list[int], ...], PlainValidator(_parse_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _parse_top_k(value: Any) -> int:
    if type(value) is not int or (value < 1 and value != -1):
        raise value_error("must be -1 (all tokens) or an integer of at least 1")
    return value


class StreamOptions(RequestModel):
    """include_usage: a last chunk with the whole stream's usage."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "continuous_usage_stats": (False,),
        "include_obfuscation": (False,),
    }
    include_usage: bool = False


class GenerationRequest(RequestModel):
    """What both endpoints share. `user` has no effect by OpenAI's definition."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = _NOT_YET
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[
        int, PlainValidator(_parse_top_k), WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]})
    ] = -1
    min_p: Fraction = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_NOT_YET,
        "add_special_tokens": (True,),
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "suffix": (),
    }
    prompt: Prompts


class TextPart(RequestModel):
    """One part of a message's content; only text parts exist here."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = dict.fromkeys(
        ("file", "image_url", "input_audio", "refusal", "video_url"), ()
    )
    type: Literal["text"]
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": TextPart.model_json_schema()}]}
Content = Annotated[list[TextPart], BeforeValidator(_as_parts), WithJsonSchema(_CONTENT_SCHEMA)]


class ChatMessage(RequestModel):
    """One turn. Answers of this server may be sent back as they are: their null fields are accepted."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "name": (),
        "reasoning_content": (),
        "refusal": (),
        "tool_calls": ([],),
    }
    role: Literal["system", "user", "assistant"]
    content: Content

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions. max_completion_tokens is OpenAI's newer name of max_tokens."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_NOT_YET,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "logprobs": (False,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest)
