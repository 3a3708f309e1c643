"""The end of a step: from the last layer's hidden states to one outcome per slice.

Legend: T tokens of the step, H hidden, V vocabulary, P sampled rows, S scored prompt tokens.
"""

import math
from collections.abc import Callable
from itertools import islice

from torch import Tensor

from attention_nodes.decoding.logprobs import score_tokens
from attention_nodes.decoding.outcome import NOT_FINITE, NOTHING, Choice, Fault, Outcome
from attention_nodes.decoding.sampler import sample
from attention_nodes.scheduling.batch import Batch
from moe_runtime.protocol.messages import TokenScore

# Rows of hidden states [rows, H] to float32 logits [rows, V].
Head = Callable[[Tensor], Tensor]
# Prompt tokens scored at once: what a long prompt's logits take in memory is this times the vocabulary.
_BLOCK_ROWS = 64


def finish_step(head: Head, x_TH: Tensor, batch: Batch) -> list[Outcome]:
    """Sample and score; x_TH are the hidden states of all tokens of the batch. The head runs on rows in need of it."""
    last, end = [], 0
    for piece in batch.slices:
        end += piece.count
        if piece.samples:
            last.append(end - 1)
    sampled = batch.sampled
    choices = iter(sample(head(x_TH[last]), [piece.request for piece in sampled]) if sampled else [])
    scores = iter(_prompt_scores(head, x_TH, batch))
    return [
        _outcome(tuple(islice(scores, len(piece.scored))), next(choices) if piece.samples else None)
        for piece in batch.slices
    ]


def _outcome(prompt_scores: tuple[TokenScore, ...], choice: Choice | Fault | None) -> Outcome:
    if isinstance(choice, Fault):
        return Outcome(fault=choice)
    if any(math.isnan(score.logprob) for score in prompt_scores):
        return Outcome(fault=NOT_FINITE)
    return Outcome(prompt_scores, choice) if prompt_scores or choice else NOTHING


def _prompt_scores(head: Head, x_TH: Tensor, batch: Batch) -> list[TokenScore]:
    """Of all slices in turn. The row of a token is the one before it, which predicts it."""
    rows, token_ids, best, first = [], [], [], 0
    for piece in batch.slices:
        scored = piece.scored
        rows += [first + position - 1 - piece.start for position in scored]
        token_ids += piece.request.tokens[scored.start : scored.stop]
        best += [piece.request.sampling.prompt_logprobs or 0] * len(scored)
        first += piece.count
    scores: list[TokenScore] = []
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        scores += score_tokens(head(x_TH[rows[block]]), token_ids[block], best[block])
    return scores
