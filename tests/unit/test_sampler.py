"""The sampler draws from exactly the distribution that temperature, top-k, top-p and min-p define.

transformers' warpers are the reference for what may be drawn and with what probability.
Legend: P rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from attention_nodes.decoding import sampler
from attention_nodes.decoding.random import draw_key
from attention_nodes.decoding.sampler import SamplingBatch, draw, sample
from attention_nodes.scheduling.request import Request
from moe_runtime.protocol.messages import SamplingParams

PARAMS = {
    "temperature": SamplingParams(1, temperature=0.7),
    "hot": SamplingParams(1, temperature=2.5),
    "top_k": SamplingParams(1, top_k=5),
    "top_p": SamplingParams(1, top_p=0.8),
    "min_p": SamplingParams(1, min_p=0.15),
    "top_k and top_p": SamplingParams(1, temperature=1.3, top_k=9, top_p=0.75),
    "top_p and min_p": SamplingParams(1, temperature=1.5, top_p=0.95, min_p=0.1),
    "all": SamplingParams(1, temperature=1.8, top_k=12, top_p=0.9, min_p=0.08),
}


def request(params: SamplingParams, seed: int = 0, position: int = 10) -> Request:
    params = msgspec.structs.replace(params, seed=seed)
    return Request(f"r{seed}", b"", [0] * position, position, params, 0, 0)


def warped(logits_PV: Tensor, params: SamplingParams) -> Tensor:
    """transformers' scores, -inf where a token may not be drawn."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits_PV.double())
    if params.top_k:
        scores = TopKLogitsWarper(min(params.top_k, scores.shape[1]))(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return MinPLogitsWarper(params.min_p)(None, scores) if params.min_p else scores


def allowed(logits_PV: Tensor, requests: Sequence[Request]) -> Tensor:
    """Which tokens the sampler may draw, bool [P, V]."""
    batch = SamplingBatch.of(requests, logits_PV.shape[1], logits_PV.device)
    assert batch is not None
    scaled_PV = (logits_PV - logits_PV.amax(-1, keepdim=True)) / batch.temperature_P[:, None]
    return scaled_PV >= sampler._threshold(scaled_PV, batch)[:, None]


def chi_square_bound(freedom: int) -> float:
    """The value that a chi-square variable exceeds once in 30,000 (Wilson and Hilferty's approximation at 4 sigma)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(("varied", "draws"), [("seed", 20_000), ("position", 5_000)])
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_come_with_their_exact_probabilities(name: str, varied: str, draws: int) -> None:
    params = PARAMS[name]
    logits_V = torch.randn(30, generator=torch.Generator().manual_seed(3)) * 1.5
    requests = [request(params, **{varied: number}) for number in range(draws)]
    tokens = torch.tensor(sample(logits_V.expand(draws, -1), requests))
    counts_V = torch.bincount(tokens, minlength=30)
    expected_V = warped(logits_V[None], params)[0].softmax(-1) * draws
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
    keys = torch.tensor([draw_key(seed, 10) for seed in range(draws)])
    batch = SamplingBatch(torch.arange(draws), 0.8 * ones, 4 * ones.long(), ones.double(), 0 * ones, keys)
    counts_V = torch.bincount(draw(logits_V.expand(draws, -1), batch), minlength=4)
    expected_V = (logits_V.double() / 0.8).softmax(-1) * draws
    assert float(((counts_V - expected_V) ** 2 / expected_V).sum()) < chi_square_bound(3)


@pytest.mark.parametrize("vocab", [60, 3000])
@pytest.mark.parametrize("name", PARAMS)
def test_what_may_be_drawn_is_what_transformers_leaves(name: str, vocab: int) -> None:
    logits_PV = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    kept_PV = allowed(logits_PV, [request(PARAMS[name])] * 40)
    assert torch.equal(kept_PV, warped(logits_PV, PARAMS[name]).isfinite())


def test_a_nucleus_beyond_the_first_candidates_is_found_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat distribution over 5000 tokens: top-p 0.9 holds far more than the candidates that are sorted first."""
    logits_PV = torch.randn(64, 5000, generator=torch.Generator().manual_seed(5)) * 0.1
    params = SamplingParams(1, top_p=0.9)
    requests = [request(params, seed) for seed in range(64)]
    kept_PV = allowed(logits_PV, requests)
    assert torch.equal(kept_PV, warped(logits_PV, params).isfinite())
    assert int(kept_PV.sum(1).min()) > 4 * sampler._FIRST_CANDIDATES
    tokens = sample(logits_PV, requests)
    monkeypatch.setattr(sampler, "_FIRST_CANDIDATES", 5000)
    assert sample(logits_PV, requests) == tokens


def test_top_k_wider_than_the_first_candidates_keeps_k() -> None:
    logits_PV = torch.randn(4, 5000, generator=torch.Generator().manual_seed(6))
    assert allowed(logits_PV, [request(SamplingParams(1, top_k=2000))] * 4).sum(1).tolist() == [2000] * 4
    assert allowed(logits_PV, [request(SamplingParams(1, top_k=9000))] * 4).all()


def test_a_row_depends_on_nothing_else_in_its_batch() -> None:
    generator = torch.Generator().manual_seed(7)
    logits_PV = torch.randn(48, 3000, generator=generator) * torch.linspace(0.05, 4, 48)[:, None]
    choices = [*PARAMS.values(), SamplingParams(1, temperature=0), SamplingParams(1, top_k=2500, top_p=0.97)]
    requests = [request(choices[row % len(choices)], seed=row, position=row + 1) for row in range(48)]
    together = sample(logits_PV, requests)
    order = torch.randperm(48, generator=generator).tolist()
    assert sample(logits_PV[order], [requests[row] for row in order]) == [together[row] for row in order]
    assert [sample(logits_PV[row : row + 1], [requests[row]])[0] for row in range(48)] == together
    assert len(set(together)) > 20


def test_neighbours_with_a_wide_top_k_do_not_move_a_nucleus_among_ties() -> None:
    """4999 equal tokens after the best one: they stand or fall together, however many candidates were sorted."""
    logits_PV = torch.zeros(2, 5000)
    logits_PV[:, 0] = 1.0
    row, neighbour = request(SamplingParams(1, top_k=2, top_p=0.001)), request(SamplingParams(1, top_k=5000))
    wide = request(SamplingParams(1, top_k=4000))
    counts = [int(allowed(logits_PV, [row, other])[0].sum()) for other in (neighbour, wide)]
    assert counts == [5000, 5000]


def test_equal_logits_stand_or_fall_together() -> None:
    logits_PV = torch.tensor([[2.0, 5.0, 5.0, 5.0, 1.0]]).expand(300, -1)
    for params in (SamplingParams(1, top_k=2), SamplingParams(1, top_k=1), SamplingParams(1, top_p=0.1)):
        assert set(sample(logits_PV, [request(params, seed) for seed in range(300)])) == {1, 2, 3}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1, temperature=0),
        SamplingParams(1, top_k=1),
        SamplingParams(1, top_p=0.0),
        SamplingParams(1, top_p=1e-9),
        SamplingParams(1, min_p=1.0),
        *(SamplingParams(1, temperature=t) for t in (1e-6, 1e-30, 1e-45, 1e-50, 5e-324)),
    ],
    ids=str,
)
def test_what_leaves_only_the_best_token_is_greedy(params: SamplingParams) -> None:
    logits_PV = torch.randn(200, 500, generator=torch.Generator().manual_seed(8))
    requests = [request(params, seed) for seed in range(200)]
    assert sample(logits_PV, requests) == logits_PV.argmax(-1).tolist()


@pytest.mark.parametrize("name", PARAMS)
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
    greedy, drawing = SamplingParams(1, temperature=0), SamplingParams(1, temperature=5.0)
    requests = [request(drawing if row % 2 else greedy, seed=row) for row in range(6)]
    tokens, best = sample(logits_PV, requests), logits_PV.argmax(-1).tolist()
    assert tokens[::2] == best[::2] and tokens[1::2] != best[1::2]
