"""What a request's sampling parameters come to, prepared once, when it first samples; freed with the request."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention_nodes.decoding.bans import Bans
from attention_nodes.decoding.masks import StaticMask
from attention_nodes.decoding.penalties import TokenHistory
from attention_nodes.decoding.random import stream_key
from moe_runtime.protocol.messages import SamplingParams

# A temperature that float32 rounds to 0 would give 0 / 0.
LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
# One row of a step's table of parameters.
ROW = np.dtype(
    [
        ("top_p", np.float64),
        ("stream", np.uint64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class DecodingState:
    """Numbers as one packed ROW, and what few requests have, None elsewhere.

    draws: not greedy.
    """

    row: bytes
    draws: bool
    bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None
    history: TokenHistory | None
    bans: Bans | None
    allowed: StaticMask | None

    @classmethod
    def of(cls, params: SamplingParams, tokens: Sequence[int], generated_from: int, vocab: int) -> "DecodingState":
        repeats = params.repetition_penalty != 1
        penalised = repeats or params.frequency_penalty != 0 or params.presence_penalty != 0
        banned = bool(params.bad_words) or bool(params.min_tokens and params.stop_token_ids)
        bias = np.array([b for _, b in params.logit_bias], np.float32)
        return cls(
            row=_row(params, vocab),
            draws=params.temperature > 0 and params.top_k != 1,
            bias=(np.array([t for t, _ in params.logit_bias], np.int64), bias) if params.logit_bias else None,
            history=TokenHistory(tokens, generated_from, with_prompt=repeats) if penalised else None,
            bans=Bans(params.bad_words, params.stop_token_ids, params.min_tokens, vocab) if banned else None,
            allowed=None if params.allowed_token_ids is None else StaticMask(params.allowed_token_ids, vocab),
        )


def _row(params: SamplingParams, vocab: int) -> bytes:
    temperature = max(params.temperature, LEAST_TEMPERATURE)
    top_k = min(params.top_k, vocab) or vocab
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    numbers = (params.top_p, stream_key(params.seed), top_k, temperature, params.min_p, *penalties)
    return np.array([numbers], ROW).tobytes()
