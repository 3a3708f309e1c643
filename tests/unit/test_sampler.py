"""The sampler draws from exactly the distribution that each parameter, alone and with others, defines.

sampling_reference.py says what that is.
Legend: P rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from sampling_reference import processed, request_of, warped
from torch import Tensor

from attention_nodes.decoding import draw as drawing
from attention_nodes.decoding import sampler
from attention_nodes.decoding.draw import DrawParams, draw, lowest_drawn
from attention_nodes.decoding.outcome import Choice
from attention_nodes.decoding.process import process
from attention_nodes.decoding.random import draw_keys, stream_key
from attention_nodes.decoding.rows import SampledRows
from attention_nodes.scheduling.request import Request
from moe_runtime.protocol.messages import SamplingParams

TRUNCATED = {
    "temperature": SamplingParams(9, temperature=0.7),
    "hot": SamplingParams(9, temperature=2.5),
    "top_k": SamplingParams(9, top_k=5),
    "top_p": SamplingParams(9, top_p=0.8),
    "min_p": SamplingParams(9, min_p=0.15),
    "top_k and top_p": SamplingParams(9, temperature=1.3, top_k=9, top_p=0.75),
    "top_p and min_p": SamplingParams(9, temperature=1.5, top_p=0.95, min_p=0.1),
    "all four": SamplingParams(9, temperature=1.8, top_k=12, top_p=0.9, min_p=0.08),
}
# The history of every row: 7 and 3 are in prompt and output, 12 and 5 in the prompt alone.
PROMPT, OUTPUT = (12, 7, 7, 3, 5), (7, 2, 2, 2, 9, 3)
PROCESSED = {
    "repetition": SamplingParams(9, repetition_penalty=1.8),
    "repetition below 1": SamplingParams(9, repetition_penalty=0.6),
    "frequency": SamplingParams(9, frequency_penalty=0.9),
    "presence": SamplingParams(9, presence_penalty=1.5),
    "negative penalties": SamplingParams(9, frequency_penalty=-0.4, presence_penalty=-0.8),
    "logit_bias": SamplingParams(9, logit_bias=((4, 2.5), (2, -1.0), (8, -100.0))),
    "allowed_token_ids": SamplingParams(9, allowed_token_ids=(0, 2, 5, 7, 11, 13, 28, 29)),
    "bad_words": SamplingParams(9, bad_words=((1,), (9, 3, 14), (2, 9, 3, 15), (3, 16), (9, 17), (7, 18, 3, 19))),
    "min_tokens": SamplingParams(9, min_tokens=7, stop_token_ids=(4, 10)),
    "min_tokens reached": SamplingParams(9, min_tokens=6, stop_token_ids=(4, 10)),
    "penalties": SamplingParams(9, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=-0.5),
    "bias against penalties": SamplingParams(9, logit_bias=((2, 4.0), (5, -1.5)), repetition_penalty=1.5),
    "masks": SamplingParams(
        9, bad_words=((3, 16), (1,)), min_tokens=8, stop_token_ids=(4,), allowed_token_ids=tuple(range(20))
    ),
    "everything": SamplingParams(
        9,
        temperature=1.6,
        top_k=14,
        top_p=0.95,
        min_p=0.03,
        stop_token_ids=(4, 10),
        min_tokens=7,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias=((2, 3.0), (1, 5.0), (20, 5.0), (11, 1.5)),
        bad_words=((1,), (9, 3, 14), (7, 15)),
        allowed_token_ids=tuple(range(20)),
    ),
}
PARAMS = TRUNCATED | PROCESSED


def request(params: SamplingParams, seed: int = 0, position: int = 11) -> Request:
    """With the fixed history; `position` is where its next token stands."""
    prompt = [*PROMPT[:1] * (position - len(PROMPT) - len(OUTPUT)), *PROMPT]
    return request_of(params, prompt, OUTPUT, seed)


def sample(logits_PV: Tensor, requests: Sequence[Request]) -> list[int]:
    choices = sampler.sample(logits_PV.clone(), requests)
    assert all(isinstance(choice, Choice) and choice.score is None for choice in choices)
    return [choice.token for choice in choices if isinstance(choice, Choice)]


def draw_params(requests: Sequence[Request], vocab: int) -> DrawParams:
    rows, cpu = SampledRows.of(requests, vocab), torch.device("cpu")
    columns = [rows.column(name, cpu) for name in ("temperature", "top_k", "top_p", "min_p")]
    return DrawParams(*columns, torch.zeros(len(requests), dtype=torch.int64))


def drawable(logits_PV: Tensor, requests: Sequence[Request]) -> Tensor:
    """Which tokens the sampler may draw, bool [P, V]."""
    logits_PV = logits_PV.clone()
    process(logits_PV, SampledRows.of(requests, logits_PV.shape[1]))
    params = draw_params(requests, logits_PV.shape[1])
    scaled_PV = (logits_PV - logits_PV.amax(-1, keepdim=True)) / params.temperature_P[:, None]
    return (scaled_PV >= lowest_drawn(scaled_PV, params)[:, None]) & scaled_PV.isfinite()


def reference(logits_V: Tensor, params: SamplingParams) -> Tensor:
    return warped(processed(logits_V, request(params)), params)


def chi_square_bound(freedom: int) -> float:
    """The value that a chi-square variable exceeds once in 30,000 (Wilson and Hilferty's approximation at 4 sigma)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(("varied", "draws"), [("seed", 10_000), ("position", 2_000)])
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_come_with_their_exact_probabilities(name: str, varied: str, draws: int) -> None:
    params = PARAMS[name]
    logits_V = torch.randn(30, generator=torch.Generator().manual_seed(3)) * 1.5
    first = 11 if varied == "position" else 0
    requests = [request(params, **{varied: first + number}) for number in range(draws)]
    tokens = torch.tensor(sample(logits_V.expand(draws, -1), requests))
    counts_V = torch.bincount(tokens, minlength=30)
    expected_V = reference(logits_V, params).softmax(-1) * draws
    assert (counts_V[expected_V == 0] == 0).all()
    rare = expected_V < 5
    counts, expected = counts_V[~rare].double(), expected_V[~rare]
    if float(expected_V[rare].sum()) > 5:
        counts = torch.cat([counts, counts_V[rare].sum()[None].double()])
        expected = torch.cat([expected, expected_V[rare].sum()[None]])
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert len(counts) > 2 and chi_square < chi_square_bound(len(counts) - 1)


def test_half_a_million_draws_show_no_bias() -> None:
    """Few tokens and many draws: a temperature wrong by one per cent would show."""
    draws, logits_V = 500_000, torch.tensor([0.0, -1.0, -2.0, -0.3])
    ones = torch.ones(draws)
    streams = np.array([stream_key(seed) for seed in range(0, draws, 100)], np.uint64).repeat(100)
    keys = torch.from_numpy(draw_keys(streams, np.arange(draws)))
    params = DrawParams(0.8 * ones, 4 * ones.long(), ones.double(), 0 * ones, keys)
    counts_V = torch.bincount(draw(logits_V.expand(draws, -1), 0 * ones, params), minlength=4)
    expected_V = (logits_V.double() / 0.8).softmax(-1) * draws
    assert float(((counts_V - expected_V) ** 2 / expected_V).sum()) < chi_square_bound(3)


@pytest.mark.parametrize("vocab", [60, 3008])
@pytest.mark.parametrize("name", PARAMS)
def test_what_may_be_drawn_is_what_transformers_leaves(name: str, vocab: int) -> None:
    logits_PV = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    kept_PV = drawable(logits_PV, [request(PARAMS[name])] * 40)
    for kept_V, logits_V in zip(kept_PV, logits_PV, strict=True):
        assert torch.equal(kept_V, reference(logits_V, PARAMS[name]).isfinite())


def test_a_nucleus_beyond_the_first_candidates_is_found_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat distribution over 5000 tokens: top-p 0.9 holds far more than the candidates that are sorted first."""
    logits_PV = torch.randn(64, 5000, generator=torch.Generator().manual_seed(5)) * 0.1
    params = SamplingParams(9, top_p=0.9)
    requests = [request(params, seed) for seed in range(64)]
    kept_PV = drawable(logits_PV, requests)
    for kept_V, logits_V in zip(kept_PV, logits_PV, strict=True):
        assert torch.equal(kept_V, warped(logits_V, params).isfinite())
    assert int(kept_PV.sum(1).min()) > 4 * drawing._FIRST_CANDIDATES
    tokens = sample(logits_PV, requests)
    monkeypatch.setattr(drawing, "_FIRST_CANDIDATES", 5000)
    assert sample(logits_PV, requests) == tokens


def test_top_k_wider_than_the_first_candidates_keeps_k() -> None:
    logits_PV = torch.randn(4, 5000, generator=torch.Generator().manual_seed(6))
    assert drawable(logits_PV, [request(SamplingParams(9, top_k=2000))] * 4).sum(1).tolist() == [2000] * 4
    assert drawable(logits_PV, [request(SamplingParams(9, top_k=9000))] * 4).all()


def test_a_row_depends_on_nothing_else_in_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    logits_PV = torch.randn(48, 3000, generator=generator) * torch.linspace(0.05, 4, 48)[:, None]
    choices = [*PARAMS.values(), SamplingParams(9, temperature=0), SamplingParams(9, top_k=2500, top_p=0.97)]
    requests = [request(choices[row % len(choices)], seed=row, position=row + 11) for row in range(48)]
    together = sample(logits_PV, requests)
    order = torch.randperm(48, generator=generator).tolist()
    assert sample(logits_PV[order], [requests[row] for row in order]) == [together[row] for row in order]
    assert [sample(logits_PV[row : row + 1], [requests[row]])[0] for row in range(48)] == together
    assert len(set(together)) > 20
    for rows in (1, 5, 47):
        monkeypatch.setattr(drawing, "_BLOCK_LOGITS", rows * 3000)
        assert sample(logits_PV, requests) == together


def test_neighbours_with_a_wide_top_k_do_not_move_a_nucleus_among_ties() -> None:
    """4999 equal tokens after the best one: they stand or fall together, however many candidates were sorted."""
    logits_PV = torch.zeros(2, 5000)
    logits_PV[:, 0] = 1.0
    row, neighbour = request(SamplingParams(9, top_k=2, top_p=0.001)), request(SamplingParams(9, top_k=5000))
    wide = request(SamplingParams(9, top_k=4000))
    counts = [int(drawable(logits_PV, [row, other])[0].sum()) for other in (neighbour, wide)]
    assert counts == [5000, 5000]


def test_equal_logits_stand_or_fall_together() -> None:
    logits_PV = torch.tensor([[2.0, 5.0, 5.0, 5.0, 1.0]]).expand(300, -1)
    for params in (SamplingParams(9, top_k=2), SamplingParams(9, top_p=0.1), SamplingParams(9, min_p=1.0)):
        assert set(sample(logits_PV, [request(params, seed) for seed in range(300)])) == {1, 2, 3}


def varied(params: SamplingParams, **changes: object) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


@pytest.mark.parametrize("name", PARAMS)
def test_greedy_and_top_k_1_agree_under_every_parameter_and_on_equal_logits(name: str) -> None:
    """Coarse logits, as bfloat16 gives them: nearly every row has several best tokens. The lowest id is taken."""
    logits_PV = (torch.randn(100, 64, generator=torch.Generator().manual_seed(12)) * 2).round()
    greedy = sample(logits_PV, [request(varied(PARAMS[name], temperature=0.0))] * 100)
    top_1 = sample(logits_PV, [request(varied(PARAMS[name], top_k=1), seed) for seed in range(100)])
    best = [processed(logits_V, request(PARAMS[name])).argmax() for logits_V in logits_PV]
    assert greedy == top_1 == best


@pytest.mark.parametrize("vocab", [1, 50, 64, 640])
def test_the_best_token_is_found_like_max_finds_it(vocab: int) -> None:
    logits_PV = (torch.randn(300, vocab, generator=torch.Generator().manual_seed(2)) * 2).round()
    logits_PV[7] = -math.inf
    logits_PV[8, vocab // 2] = math.nan
    best_P, token_P = sampler._best(logits_PV)
    expected_P = logits_PV.max(-1)
    assert torch.equal(token_P, expected_P.indices)
    assert torch.equal(best_P[9:], expected_P.values[9:])
    assert best_P[7] == -math.inf and best_P[8].isnan()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(9, temperature=0),
        SamplingParams(9, top_k=1),
        SamplingParams(9, top_p=0.0),
        SamplingParams(9, top_p=1e-9),
        SamplingParams(9, min_p=1.0),
        *(SamplingParams(9, temperature=t) for t in (1e-6, 1e-30, 1e-45, 1e-50, 5e-324)),
    ],
    ids=str,
)
def test_what_leaves_only_the_best_token_is_greedy(params: SamplingParams) -> None:
    logits_PV = torch.randn(200, 500, generator=torch.Generator().manual_seed(8))
    requests = [request(params, seed) for seed in range(200)]
    assert sample(logits_PV, requests) == logits_PV.argmax(-1).tolist()


@pytest.mark.parametrize("name", TRUNCATED)
def test_extreme_logits_draw_one_of_the_best(name: str) -> None:
    inf, most = float("inf"), torch.finfo(torch.float32).max
    rows = [
        ([1e30, -1e30, 0.0, 1e30], {0, 3}),
        ([-inf, 3.0, -inf, -inf], {1}),
        ([-most, -most, most, -inf], {2}),
        ([-1e30, -1e30, -1e30, -inf], {0, 1, 2}),
    ]
    for logits, best in rows:
        requests = [request(PARAMS[name], seed) for seed in range(100)]
        assert set(sample(torch.tensor([logits]).expand(100, -1), requests)) == best


def test_greedy_rows_between_drawing_rows_keep_their_places() -> None:
    logits_PV = torch.randn(6, 50, generator=torch.Generator().manual_seed(9))
    greedy, drawing = SamplingParams(9, temperature=0), SamplingParams(9, temperature=5.0)
    requests = [request(drawing if row % 2 else greedy, seed=row) for row in range(6)]
    tokens, best = sample(logits_PV, requests), logits_PV.argmax(-1).tolist()
    assert tokens[::2] == best[::2] and tokens[1::2] != best[1::2]
