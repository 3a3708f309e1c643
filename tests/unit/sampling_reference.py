"""What a row's logits and distribution must be, from transformers' processors where they exist, else from the formula.

One row at a time, in float64, with plain loops.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attention_nodes.scheduling.request import Request
from moe_runtime.protocol.messages import SamplingParams


def request_of(
    params: SamplingParams, prompt: Sequence[int] = (0,), output: Sequence[int] = (), seed: int | None = None
) -> Request:
    params = params if seed is None else msgspec.structs.replace(params, seed=seed)
    return Request("r", b"", [*prompt, *output], len(prompt), params, 0, 0)


def processed(logits_V: Tensor, request: Request) -> Tensor:
    """Logits [V] after bias, penalties and masks, -inf where a token may not come."""
    params, ids = request.sampling, torch.tensor([request.tokens])
    scores = logits_V.double()[None]
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[t], float(b)] for t, b in params.logit_bias])(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    output = request.tokens[request.generated_from :]
    for token in set(output):
        scores[0, token] -= params.frequency_penalty * output.count(token)
        scores[0, token] -= params.presence_penalty
    if params.bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids, scores)
    if params.stop_token_ids:
        stops = list(params.stop_token_ids)
        scores = MinNewTokensLengthLogitsProcessor(request.generated_from, params.min_tokens, stops)(ids, scores)
    if params.allowed_token_ids is not None:
        for token in range(scores.shape[1]):
            if token not in params.allowed_token_ids:
                scores[0, token] = -torch.inf
    return scores[0]


def warped(scores_V: Tensor, params: SamplingParams) -> Tensor:
    """Scores [V] whose softmax is the distribution, -inf where a token may not be drawn."""
    scores = TemperatureLogitsWarper(params.temperature)(None, scores_V.double()[None])
    if params.top_k:
        scores = TopKLogitsWarper(min(params.top_k, scores.shape[1]))(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return (MinPLogitsWarper(params.min_p)(None, scores) if params.min_p else scores)[0]
