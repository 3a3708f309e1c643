"""The request bodies of /tokenize and /detokenize, in vLLM's forms."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moe_runtime.gateway.errors import invalid
from moe_runtime.gateway.fields import RequestModel
from moe_runtime.gateway.parameter_types import TokenIds
from moe_runtime.gateway.schema import Conversation


class TokenizeTextRequest(RequestModel):
    """Body of /tokenize: the tokens of a text, as /v1/completions would see it."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(Conversation):
    """Body of /tokenize: the tokens of a conversation, as /v1/chat/completions would see it."""

    not_yet: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "tools": ([],),
    }
    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Body of /detokenize: the text of token ids, special tokens' text included."""

    model: str | None = None
    tokens: TokenIds


def tokenize_form(body: Any) -> type[TokenizeTextRequest] | type[TokenizeChatRequest]:
    """Which of the two forms a body of /tokenize has. Raises ApiError 400 if both."""
    chat = isinstance(body, dict) and "messages" in body
    if chat and body.get("prompt") is not None:
        raise invalid("prompt: cannot be given together with messages", "prompt")
    return TokenizeChatRequest if chat else TokenizeTextRequest
