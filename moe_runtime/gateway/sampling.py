"""From a checked request to the engine's sampling parameters: what is left open is decided here."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from moe_runtime.gateway.errors import ApiError, invalid
from moe_runtime.gateway.schema import GenerationRequest
from moe_runtime.gateway.tokenizer import TextTokenizer
from moe_runtime.protocol.messages import SamplingParams

# Dividing logits by less than this overflows float32 without changing a choice: it is greedy.
_GREEDY_BELOW = 1e-5
# Tokenizers split words from it, so that what follows is spelled as in the middle of a text.
_BEFORE_WORD = "\n"


@dataclass(frozen=True)
class Limits:
    """capacity: the most tokens, prompt and new ones together, that a request can have."""

    capacity: int
    max_tokens_default: int
    vocab: int
    eos_ids: tuple[int, ...]


def check_vocabulary(request: GenerationRequest, vocab: int) -> None:
    """Raises ApiError 400 naming the field with a token id outside 0..vocab - 1."""
    fields: tuple[tuple[str, Iterable[int]], ...] = (
        ("logit_bias", request.logit_bias),
        ("stop_token_ids", request.stop_token_ids),
        ("allowed_token_ids", request.allowed_token_ids or ()),
    )
    for field, ids in fields:
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise invalid(f"{field}: token id {wrong} is outside the vocabulary 0..{vocab - 1}", field)


def spell_bad_words(words: Sequence[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens in the middle of a text, with and without a space before it, without duplicates.

    Raises ApiError 400 for a word that the tokenizer makes nothing of.
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.removeprefix(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            spelling = _spell(text, tokenizer)
            if not spelling:
                raise invalid(f"bad_words: the tokenizer makes no tokens of {word[:80]!r}", "bad_words")
            spellings[spelling] = None
    return tuple(spellings)


def _spell(text: str, tokenizer: TextTokenizer) -> tuple[int, ...]:
    before = tokenizer.encode(_BEFORE_WORD, special_tokens=False)
    both = tokenizer.encode(_BEFORE_WORD + text, special_tokens=False)
    if before and both[: len(before)] == before and len(both) > len(before):
        return tuple(both[len(before) :])
    return tuple(tokenizer.encode(text, special_tokens=False))


def fit_prompt(request: GenerationRequest, prompt: tuple[int, ...], limits: Limits) -> tuple[int, ...]:
    """The prompt's end where truncate_prompt_tokens asks for it. Raises ApiError 400 if nothing of it would be left."""
    kept = request.truncate_prompt_tokens
    if kept is None:
        return prompt
    if kept == -1:
        asked = request.max_new_tokens
        new_tokens = max(1, request.min_tokens) if asked is None else asked
        kept = limits.capacity - new_tokens
        if kept < 1:
            field = "min_tokens" if asked is None else "max_tokens"
            raise _too_long(f"{new_tokens} new tokens leave no room for a prompt", limits, field)
    return prompt[-kept:]


def sampling_params(
    request: GenerationRequest,
    prompt_tokens: int,
    bad_words: tuple[tuple[int, ...], ...],
    limits: Limits,
    prompt_field: str,
) -> SamplingParams:
    """What all choices of a prompt share; see choice_params for the rest.

    Clamps top_k to the vocabulary. Raises ApiError 400 if the request is too long, or leaves no token to draw.
    """
    stop_token_ids = tuple(dict.fromkeys((*(() if request.ignore_eos else limits.eos_ids), *request.stop_token_ids)))
    _check_choice_left(request, bad_words, stop_token_ids, limits.vocab)
    return SamplingParams(
        max_tokens=_max_tokens(request, prompt_tokens, limits, prompt_field),
        temperature=0.0 if request.temperature < _GREEDY_BELOW else request.temperature,
        top_k=0 if request.top_k == -1 else min(request.top_k, limits.vocab),
        top_p=request.top_p,
        min_p=request.min_p,
        stop_token_ids=stop_token_ids,
        min_tokens=request.min_tokens,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=tuple((token, bias) for token, bias in request.logit_bias.items() if bias),
        bad_words=bad_words,
        allowed_token_ids=request.allowed_token_ids,
        logprobs=request.scored,
    )


def choice_params(shared: SamplingParams, request: GenerationRequest, index: int) -> SamplingParams:
    """Of choice `index` of a prompt: its own seed; and only the first one reports a prompt that no text shows."""
    seed = _random_seed() if request.seed is None else _to_int64(request.seed + index)
    shown = request.scored if request.echoed else None
    reported = request.prompt_logprobs if index == 0 else None
    counts = [count for count in (shown, reported) if count is not None]
    return msgspec.structs.replace(shared, seed=seed, prompt_logprobs=max(counts, default=None))


def _max_tokens(request: GenerationRequest, prompt_tokens: int, limits: Limits, prompt_field: str) -> int:
    room, asked = limits.capacity - prompt_tokens, request.max_new_tokens
    if room < (1 if asked != 0 else 0):
        raise prompt_too_long(prompt_tokens, limits, prompt_field)
    field = "max_tokens" if asked is not None else "min_tokens"
    needed = asked if asked is not None else request.min_tokens
    if needed > room:
        total = prompt_tokens + needed
        raise _too_long(f"{prompt_tokens} prompt tokens and {needed} new ones are {total}", limits, field)
    return asked if asked is not None else max(min(limits.max_tokens_default, room), request.min_tokens)


def _check_choice_left(
    request: GenerationRequest, bad_words: tuple[tuple[int, ...], ...], stop_token_ids: tuple[int, ...], vocab: int
) -> None:
    """A conflict of masks that holds for the first token already; later ones show on the engine."""
    banned = {word[0] for word in bad_words if len(word) == 1} | set(stop_token_ids if request.min_tokens else ())
    allowed = range(vocab) if request.allowed_token_ids is None else request.allowed_token_ids
    if all(token in banned for token in allowed):
        field = "bad_words" if request.allowed_token_ids is None else "allowed_token_ids"
        without = "bad_words and, before min_tokens, the tokens that end the text"
        raise invalid(f"{field}: no token is left without {without}", field)


def prompt_too_long(tokens: int, limits: Limits, field: str) -> ApiError:
    """A prompt of so many tokens cannot be answered; `field` holds it."""
    return _too_long(f"{tokens} tokens of {field} leave no room for new ones", limits, field)


def _too_long(what: str, limits: Limits, param: str) -> ApiError:
    return invalid(f"{what}; at most {limits.capacity} tokens fit", param, "context_length_exceeded")


def _random_seed() -> int:
    return int.from_bytes(os.urandom(8), "big", signed=True)


def _to_int64(number: int) -> int:
    """Wrapped around, so that the seed after the largest is the smallest."""
    return (number + 2**63) % 2**64 - 2**63
