"""Scores are the model's own log-softmax, rank and best tokens, whatever the parameters and the neighbours.

Legend: S rows, V vocabulary.
"""

import math
import random

import msgspec
import pytest
import torch
from sampling_reference import request_of
from torch import Tensor

from attention_nodes.decoding.logprobs import score_tokens
from attention_nodes.decoding.outcome import NONE_LEFT, NOT_FINITE, Choice
from attention_nodes.decoding.sampler import sample
from moe_runtime.protocol.messages import SamplingParams, TokenScore


def logits(rows: int, vocab: int, coarse: bool) -> Tensor:
    x_SV = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows + vocab)) * 3
    return x_SV.round() if coarse else x_SV


def expected(logits_V: Tensor, token: int, best: int) -> TokenScore:
    """Plain Python; equal logits in order of id."""
    values, logprobs = logits_V.tolist(), logits_V.double().log_softmax(-1).tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:best]
    rank = 1 + sum(value > values[token] for value in values)
    return TokenScore(logprobs[token], rank, tuple((i, logprobs[i]) for i in order))


def assert_equal(ours: TokenScore, theirs: TokenScore) -> None:
    assert ours.rank == theirs.rank and ours.logprob == pytest.approx(theirs.logprob, rel=1e-5, abs=1e-5)
    assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("vocab", [3, 50, 2000])
def test_scores_equal_a_plain_reference_and_do_not_depend_on_neighbours(vocab: int, coarse: bool) -> None:
    dice = random.Random(vocab)
    logits_SV = logits(30, vocab, coarse)
    tokens = [dice.randrange(vocab) for _ in range(30)]
    best = [dice.choice((0, 0, 1, 2, 5, 20)) for _ in range(30)]
    scores = score_tokens(logits_SV, tokens, best)
    for row, score in enumerate(scores):
        assert len(score.top) == min(best[row], vocab)
        assert_equal(score, expected(logits_SV[row], tokens[row], best[row]))
        assert score_tokens(logits_SV[row : row + 1], tokens[row : row + 1], best[row : row + 1]) == [score]


def test_a_row_of_equal_logits_has_rank_1_everywhere_and_the_first_ids_as_best() -> None:
    (score,) = score_tokens(torch.zeros(1, 500), [499], [3])
    assert score.rank == 1 and [token for token, _ in score.top] == [0, 1, 2]
    assert score.logprob == pytest.approx(-math.log(500), abs=1e-5)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_extreme_logits_have_finite_scores(scale: float) -> None:
    (score,) = score_tokens(torch.tensor([[3.0, -1.0, 0.5]]) * scale, [1], [2])
    assert math.isfinite(score.logprob) and score.rank == 3 and all(math.isfinite(p) for _, p in score.top)


def test_broken_rows_have_nan_and_leave_the_others_alone() -> None:
    logits_SV = logits(5, 80, coarse=False)
    whole = score_tokens(logits_SV, [1] * 5, [4] * 5)
    logits_SV[1, 70], logits_SV[4] = math.nan, math.nan
    broken = score_tokens(logits_SV, [1] * 5, [4] * 5)
    assert [math.isnan(score.logprob) for score in broken] == [False, True, False, False, True]
    assert [broken[row] for row in (0, 2, 3)] == [whole[row] for row in (0, 2, 3)]


EVERYTHING = SamplingParams(
    9,
    temperature=1.5,
    top_k=20,
    top_p=0.9,
    repetition_penalty=1.7,
    frequency_penalty=1.0,
    presence_penalty=1.0,
    logit_bias=((3, 40.0), (5, -40.0)),
    bad_words=((4,),),
    allowed_token_ids=tuple(range(3, 60)),
)


@pytest.mark.parametrize("params", [SamplingParams(9, temperature=0.0), SamplingParams(9), EVERYTHING], ids="gde")
def test_a_sampled_token_is_scored_before_any_parameter_changes_the_logits(params: SamplingParams) -> None:
    logits_SV = logits(12, 80, coarse=False)
    counts = [None, 0, 3] * 4
    requests = [
        request_of(msgspec.structs.replace(params, logprobs=count), (3, 4), (50, 3), seed=row)
        for row, count in enumerate(counts)
    ]
    choices = sample(logits_SV.clone(), requests)
    for row, (count, choice) in enumerate(zip(counts, choices, strict=True)):
        assert isinstance(choice, Choice) and (choice.score is None) == (count is None)
        if choice.score is not None:
            assert_equal(choice.score, expected(logits_SV[row], choice.token, count or 0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_or_with_broken_logits_is_a_fault_of_its_own(temperature: float) -> None:
    logits_SV = logits(7, 96, coarse=False)
    params = [SamplingParams(9, temperature=temperature, top_p=0.9, logprobs=2) for _ in range(7)]
    params[1] = msgspec.structs.replace(params[1], allowed_token_ids=())
    params[2] = msgspec.structs.replace(params[2], allowed_token_ids=(4, 5), bad_words=((4,), (5,)))
    params[3] = msgspec.structs.replace(params[3], allowed_token_ids=(4,))
    logits_SV[3, 90], logits_SV[4, 3], logits_SV[5] = math.nan, math.inf, -math.inf
    choices = sample(logits_SV.clone(), [request_of(p, seed=row) for row, p in enumerate(params)])
    assert choices[1:6] == [NONE_LEFT, NONE_LEFT, NOT_FINITE, NOT_FINITE, NOT_FINITE]
    whole = sample(logits_SV[[0, 6]], [request_of(params[row], seed=row) for row in (0, 6)])
    assert [choices[0], choices[6]] == whole and all(isinstance(choice, Choice) for choice in whole)


def test_an_infinite_logit_that_a_penalty_bounds_still_has_no_score() -> None:
    params = SamplingParams(9, temperature=0.0, repetition_penalty=1.5, logprobs=0)
    assert sample(torch.tensor([[1.0, math.inf, 2.0]]), [request_of(params, (1,))]) == [NOT_FINITE]
