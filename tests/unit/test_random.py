"""The counter-based draws: keyed by nothing but (seed, position, token id), and random along each of the three."""

import math

import pytest
import torch
from torch import Tensor

from attention_nodes.decoding.random import draw_key, gumbel

MASK = (1 << 64) - 1


def uniform(keys: list[int], ids: list[int]) -> Tensor:
    """The uniform numbers behind the Gumbel draws."""
    return torch.exp(-torch.exp(-gumbel(torch.tensor(keys), torch.tensor(ids))))


def along(axis: str, count: int) -> Tensor:
    """Draws that differ in one coordinate only."""
    if axis == "token":
        return uniform([draw_key(7, 3)] * count, list(range(count)))
    if axis == "position":
        return uniform([draw_key(7, position) for position in range(count)], [11] * count)
    return uniform([draw_key(seed, 3) for seed in range(-count // 2, count - count // 2)], [11] * count)


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_draws_are_uniform_along_each_coordinate(axis: str) -> None:
    draws, bins = along(axis, 64_000), 64
    counts = torch.histc(draws, bins=bins, min=0.0, max=1.0)
    expected = len(draws) / bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 63 degrees of freedom: mean 63, standard deviation 11.2.
    assert abs(chi_square - 63) < 4 * 11.2


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
@pytest.mark.parametrize("distance", [1, 2, 16])
def test_neighbours_are_uncorrelated(axis: str, distance: int) -> None:
    draws = along(axis, 40_000)
    pair = torch.stack([draws[:-distance], draws[distance:]])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / math.sqrt(pair.shape[1])


def test_two_requests_share_no_stream() -> None:
    """Not even a shifted one: seed s at position p + 1 must differ from seed s + 1 at position p, and so on."""
    keys = [draw_key(seed, position) for seed in range(-100, 100) for position in range(100)]
    assert len(set(keys)) == len(keys)
    assert draw_key(5, 1) != draw_key(5 + 0x9E3779B97F4A7C15, 0), "the step of one stream is another's seed"
    ids = torch.arange(50).repeat(200)
    draws = gumbel(torch.tensor(keys[:200]).repeat_interleave(50), ids)
    assert len(draws.unique()) == len(draws)


def test_a_draw_depends_on_its_own_key_and_token_alone() -> None:
    keys, ids = torch.tensor([draw_key(s, 5) for s in range(40)]), torch.arange(40) * 1000
    together = gumbel(keys, ids)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(keys[order], ids[order]), together[order])
    alone = torch.cat([gumbel(keys[i : i + 1], ids[i : i + 1]) for i in range(40)])
    assert torch.equal(alone, together)


def test_the_mixing_is_splitmix64() -> None:
    """First outputs of the published generator for seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = torch.tensor([((x >> 12) + 0.5) / 2**52 for x in published], dtype=torch.float64)
    torch.testing.assert_close(uniform([1234567] * 4, [0, 1, 2, 3]), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("position", [0, 1, 10**9])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_seed_gives_a_key_that_fits_int64(seed: int, position: int) -> None:
    key = draw_key(seed, position)
    assert -(2**63) <= key < 2**63
    assert torch.isfinite(gumbel(torch.tensor([key]), torch.tensor([0])))


def test_the_extreme_hashes_give_finite_draws() -> None:
    def key_of_hash(x: int) -> int:
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            x = (x ^ (x >> shift) ^ (x >> 2 * shift)) * pow(factor, -1, 1 << 64) & MASK
        x = (x - 0x9E3779B97F4A7C15) & MASK
        return x - (1 << 64) if x >> 63 else x

    low, high = gumbel(torch.tensor([key_of_hash(0), key_of_hash(MASK)]), torch.tensor([0, 0])).tolist()
    assert math.isfinite(low) and math.isfinite(high)
    assert low == pytest.approx(-math.log(53 * math.log(2)))
    assert high == pytest.approx(-math.log(-math.log1p(-(2.0**-53))))
