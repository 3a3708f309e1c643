"""What each route answers, as models for the OpenAPI document; the answers themselves are written elsewhere."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]
FinishReason = Literal["stop", "length"]


class AnswerModel(BaseModel):
    """Every field is listed, and there is no other."""

    model_config = ConfigDict(extra="forbid", title=None)


class Usage(AnswerModel):
    """A prompt counts once, however many choices it has; the end-of-text token is a completion token."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class PromptToken(AnswerModel):
    """A candidate for one place of the prompt; rank 1 is the model's best."""

    logprob: Logprob
    rank: Annotated[int, Field(ge=1)]
    decoded_token: str


# One entry per token, by token id; the first token has none.
PromptLogprobs = list[dict[str, PromptToken] | None]


class TextLogprobs(AnswerModel):
    """Parallel lists, one entry per token; null for a prompt's first one (echo)."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]


class TextChoice(AnswerModel):
    """stop_reason: the stop string or stop_token_ids' id that ended the text; null for end-of-text and length."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(AnswerModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[TextChoice], Field(min_length=1)]
    usage: Usage


class TextChunkChoice(AnswerModel):
    """finish_reason is set once, in a choice's last chunk."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class TextCompletionChunk(AnswerModel):
    """One event of /v1/completions with stream; the last one before [DONE] has no choices if it has the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: Usage | None = None


class RankedToken(AnswerModel):
    """bytes: the token's UTF-8, which may be part of a character."""

    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatToken(RankedToken):
    """A token of the answer, and the best ones for its place."""

    top_logprobs: list[RankedToken]


class ChatLogprobs(AnswerModel):
    """One entry per token whose text is in the answer."""

    content: list[ChatToken]
    refusal: None


class AssistantMessage(AnswerModel):
    """The answer's text."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(AnswerModel):
    """See TextChoice."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(AnswerModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(AnswerModel):
    """What is new: the role once, then text, then nothing in the chunk that has the finish_reason."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(AnswerModel):
    """See TextChunkChoice."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class ChatCompletionChunk(AnswerModel):
    """One event of /v1/chat/completions with stream; see TextCompletionChunk."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(AnswerModel):
    """One name of the model; root is its proper name, max_model_len the most tokens of a request."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: Count


class ModelList(AnswerModel):
    """Every name, the proper one first."""

    object: Literal["list"]
    data: Annotated[list[ModelCard], Field(min_length=1)]


class Tokens(AnswerModel):
    """token_strs: the vocabulary's own spelling of each, if asked for."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Text(AnswerModel):
    """The text of /detokenize's tokens."""

    prompt: str


class Version(AnswerModel):
    """The server's version."""

    version: str


class State(AnswerModel):
    """All is well; anything else is an error."""

    status: Literal["ok"]


class ErrorDetail(AnswerModel):
    """param names the field at fault; code is a word that programs can test."""

    message: Annotated[str, Field(min_length=1)]
    type: str
    param: str | None
    code: str | None


class Error(AnswerModel):
    """Every answer that is not 200, and the last event of a stream that breaks off."""

    error: ErrorDetail
