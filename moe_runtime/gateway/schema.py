"""The request bodies of OpenAI's two endpoints, with the fields and ranges that this server honours."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from moe_runtime.gateway.fields import RequestModel, field_error
from moe_runtime.gateway.parameter_types import (
    AllowedTokens,
    BadWords,
    CountOrAll,
    Fraction,
    LogitBias,
    LogprobCount,
    Penalty,
    Prompts,
    Stop,
    StopTokens,
)

MAX_MESSAGES = 4096
MAX_CHOICES = 256
MAX_ALLOWED = 2**20

# Values that ask for nothing. Where a number has its neutral value, sending it changes no text.
_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "cache_salt": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "metadata": ({},),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "use_beam_search": (False,),
}


class StreamOptions(RequestModel):
    """include_usage: a last chunk with the stream's usage; continuous_usage_stats: usage so far in every chunk."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {"include_obfuscation": (False,)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(RequestModel, ABC):
    """What both endpoints share. `user` has no effect by OpenAI's definition.

    truncate_prompt_tokens keeps the prompt's last tokens: so many, or with -1 as many as leave room for the answer.
    timeout: seconds after which the request ends with status 408. seed: choice i of a prompt draws with seed + i.
    """

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = _NOT_YET
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: CountOrAll = -1
    min_p: Fraction = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)] = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop = ()
    stop_token_ids: StopTokens = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: LogprobCount | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    timeout: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def choices(self) -> int:
        """How many texts are asked for."""
        return self.n

    @property
    @abstractmethod
    def scored(self) -> int | None:
        """How many of the best tokens to report with each one; None for no scores at all."""

    @property
    def echoed(self) -> bool:
        """Whether the prompt's text comes first."""
        return False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @model_validator(mode="after")
    def _check_pairs(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "only a request with stream: true can have it")
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "only an answer that is not streamed can show them")
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise field_error("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_new_tokens}")
        # Every choice is sent to its node with ids of its own.
        if len(self.allowed_token_ids or ()) * self.choices > MAX_ALLOWED:
            counts = f"{len(self.allowed_token_ids or ())} ids in each of {self.choices} choices"
            raise field_error("allowed_token_ids", f"{counts} are more than the {MAX_ALLOWED} allowed in a request")
        return self


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions. max_tokens may be 0 with echo: the prompt is only scored."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {**_NOT_YET, "suffix": ()}
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: LogprobCount | None = None

    @property
    def choices(self) -> int:
        return len(self.prompt) * self.n

    @property
    def scored(self) -> int | None:
        return self.logprobs

    @property
    def echoed(self) -> bool:
        return self.echo

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "must be at least 1, or 0 with echo: true")
        if self.choices > MAX_CHOICES:
            counts = f"{len(self.prompt)} prompts with {self.n} choices each"
            raise field_error("n", f"{counts} are more than the {MAX_CHOICES} choices that one request may ask for")
        return self


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


class Conversation(RequestModel):
    """Messages and how the chat template renders them; `model` is checked by the endpoint.

    continue_final_message: the last message is the beginning of the answer. chat_template_kwargs: further variables of
    the model's own template.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_ending(self) -> "Conversation":
        if self.continue_final_message:
            if self.messages[-1].role != "assistant":
                raise field_error("continue_final_message", "the last message must be the assistant's")
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                raise field_error("continue_final_message", "cannot be true together with add_generation_prompt")
        return self


class ChatRequest(Conversation, GenerationRequest):
    """Body of /v1/chat/completions. max_completion_tokens is OpenAI's newer name of max_tokens."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_NOT_YET,
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount = 0

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def scored(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs: true")
        if self.max_tokens not in (None, self.max_new_tokens):
            both = f"{self.max_tokens} differs from max_completion_tokens, {self.max_completion_tokens}"
            raise field_error("max_tokens", f"{both}: give one of them")
        return self
