"""From a checked request to the engine's sampling parameters: what is left open is decided here."""

import os
from dataclasses import dataclass

from moe_runtime.gateway.errors import ApiError, invalid
from moe_runtime.gateway.schema import GenerationRequest
from moe_runtime.protocol.messages import SamplingParams

# Dividing logits by less than this overflows float32 without changing a choice: it is greedy.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Limits:
    """capacity: the most tokens, prompt and new ones together, that a request can have."""

    capacity: int
    max_tokens_default: int
    vocab: int
    eos_ids: tuple[int, ...]


def sampling_params(
    request: GenerationRequest, prompt_tokens: int, limits: Limits, prompt_field: str
) -> SamplingParams:
    """Draws a missing seed and clamps top_k to the vocabulary. Raises ApiError 400 if the request is too long."""
    return SamplingParams(
        max_tokens=_max_tokens(request, prompt_tokens, limits, prompt_field),
        temperature=0.0 if request.temperature < _GREEDY_BELOW else request.temperature,
        top_k=0 if request.top_k == -1 else min(request.top_k, limits.vocab),
        top_p=request.top_p,
        min_p=request.min_p,
        seed=int.from_bytes(os.urandom(8), "big", signed=True) if request.seed is None else request.seed,
        stop_token_ids=() if request.ignore_eos else limits.eos_ids,
    )


def _max_tokens(request: GenerationRequest, prompt_tokens: int, limits: Limits, prompt_field: str) -> int:
    room = limits.capacity - prompt_tokens
    if room < 1:
        raise _too_long(f"{prompt_tokens} tokens of {prompt_field} leave no room for new ones", limits, prompt_field)
    asked = request.max_new_tokens
    if asked is None:
        return min(limits.max_tokens_default, room)
    if asked > room:
        total = prompt_tokens + asked
        raise _too_long(f"{prompt_tokens} prompt tokens and {asked} new ones are {total}", limits, "max_tokens")
    return asked


def _too_long(what: str, limits: Limits, param: str) -> ApiError:
    return invalid(f"{what}; at most {limits.capacity} tokens fit", param, "context_length_exceeded")
