"""Paged attention against plain dense causal attention in float64, one request at a time.

Every slot of the pool that no step has written is NaN, or the largest number where there is no NaN.
Legend: T tokens, L tokens of a request, A query heads, G kv heads, D head dimension, N blocks, B tokens a block.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.kernels.attention_plan import SequenceSlice
from moe_runtime.kernels.triton.paged import Cache, paged_attention, plan_paged
from tests.interpreted.reference import CPU

SCALE = 0.3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 0.03}
CACHES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
# How large a number can be, and what stands for one that nobody wrote.
RANGE = {torch.int8: 100.0, torch.float8_e4m3fn: 300.0}
STALE = {torch.int8: 127.0, torch.float8_e4m3fn: float("nan")}


@dataclass(frozen=True)
class Shape:
    block_size: int
    kv_heads: int
    ratio: int
    dim: int
    window: int | None
    dtype: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32


def dense(q_CAD: Tensor, k_LGD: Tensor, v_LGD: Tensor, start: int, window: int | None) -> Tensor:
    """Rows start..start+C-1 of one request's causal attention, float64 [C, A, D]."""
    ratio = q_CAD.shape[1] // k_LGD.shape[1]
    k_LAD, v_LAD = k_LGD.double().repeat_interleave(ratio, 1), v_LGD.double().repeat_interleave(ratio, 1)
    age_CL = torch.arange(start, start + len(q_CAD))[:, None] - torch.arange(len(k_LGD))
    hidden_CL = (age_CL < 0) | (age_CL >= (window or len(k_LGD)))
    scores_ACL = torch.einsum("cad,lad->acl", q_CAD.double(), k_LAD) * SCALE
    return torch.einsum("acl,lad->cad", scores_ACL.masked_fill(hidden_CL, -torch.inf).softmax(-1), v_LAD)


class Step:
    """Requests with random caches, laid out in shuffled blocks. pieces: (start, count), one-token ones first."""

    def __init__(self, shape: Shape, pieces: Sequence[tuple[int, int]], seed: int) -> None:
        torch.manual_seed(seed)
        self.shape = shape
        needed = [-(-(start + count) // shape.block_size) for start, count in pieces]
        ids = list(range(sum(needed) + 3))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        size = (shape.kv_heads, sum(needed) + 3, shape.block_size, shape.dim)
        pools = [torch.full(size, STALE.get(shape.cache, float("nan"))) for _ in range(2)]
        scaled = shape.cache in RANGE
        scales_G = torch.linspace(0.7, 1.3, shape.kv_heads) / RANGE.get(shape.cache, 1.0)
        queries, results = [], []
        for (start, count), table in zip(pieces, self.tables, strict=True):
            numbers = torch.randn(2, start + count, shape.kv_heads, shape.dim).clamp(-3, 3)
            if scaled:
                numbers = (numbers / 3 * RANGE[shape.cache]).round()
            numbers = numbers.to(shape.cache).float()
            for position in range(start + count):
                block, offset = table[position // shape.block_size], position % shape.block_size
                for pool, new_LGD in zip(pools, numbers, strict=True):
                    pool[:, block, offset] = new_LGD[position]
            k_LGD, v_LGD = numbers * scales_G[:, None] if scaled else numbers
            queries.append(torch.randn(count, shape.kv_heads * shape.ratio, shape.dim).to(shape.dtype))
            results.append(dense(queries[-1], k_LGD, v_LGD, start, shape.window))
        keys, values = (pool.to(shape.cache) for pool in pools)
        self.cache = Cache(keys, values, scales_G, scales_G) if scaled else Cache(keys, values)
        self.q_TAD, self.exact_TQ = torch.cat(queries), torch.cat(results).flatten(1)
        slices = [SequenceSlice(*piece, table) for piece, table in zip(pieces, self.tables, strict=True)]
        self.plan = plan_paged(slices, shape.block_size, CPU)

    def run(self) -> Tensor:
        return paged_attention(self.q_TAD, self.cache, self.plan, self.shape.window, SCALE)

    def check(self) -> None:
        tolerance = TOLERANCE[self.shape.dtype]
        found_TQ = self.run()
        assert found_TQ.dtype == self.shape.dtype
        torch.testing.assert_close(found_TQ.double(), self.exact_TQ, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    shape=st.builds(
        Shape,
        block_size=st.sampled_from((1, 4, 16)),
        kv_heads=st.integers(1, 3),
        ratio=st.integers(1, 5),
        dim=st.sampled_from((8, 16, 24)),
        window=st.none() | st.integers(1, 90),
        dtype=st.sampled_from(list(TOLERANCE)),
        cache=st.sampled_from(CACHES),
    ),
    decodes=st.lists(st.tuples(st.integers(0, 90), st.just(1)), max_size=4),
    chunks=st.lists(st.tuples(st.sampled_from((0, 0, 1, 7, 63, 70)), st.integers(2, 20)), max_size=2),
    seed=st.integers(0, 99),
)
def test_any_step(shape: Shape, decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], seed: int) -> None:
    if decodes or chunks:
        Step(shape, [*decodes, *chunks], seed).check()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [None, 600])
def test_a_row_of_several_pieces(cache: torch.dtype, window: int | None) -> None:
    """Beside rows of one piece; with a window the first piece is not looked at by the longest row."""
    shape = Shape(block_size=16, kv_heads=2, ratio=3, dim=16, window=window, cache=cache)
    Step(shape, [(1300, 1), (511, 1), (512, 1), (0, 1)], seed=1).check()


def test_more_heads_than_a_tile_has_rows() -> None:
    """One kv head for 40 query heads: padded to 64, one token a tile."""
    Step(Shape(block_size=4, kv_heads=1, ratio=40, dim=8, window=7), [(9, 1), (5, 3)], seed=2).check()


@pytest.mark.parametrize("window", [None, 40])
def test_nothing_of_another_request_reaches_a_row(window: int | None) -> None:
    """The same request alone and beside longer ones gives the same bits, whatever the others hold, NaN included."""
    shape = Shape(block_size=4, kv_heads=2, ratio=2, dim=16, window=window)
    step = Step(shape, [(100, 1), (700, 1), (0, 9)], seed=3)
    before_TQ = step.run()
    for table in step.tables[1:2]:
        step.cache.keys_GNBD[:, table] = step.cache.values_GNBD[:, table] = float("nan")
    after_TQ = step.run()
    assert torch.equal(after_TQ[0], before_TQ[0]) and torch.equal(after_TQ[2:], before_TQ[2:])
    alone = plan_paged([SequenceSlice(100, 1, step.tables[0])], 4, CPU)
    assert alone.longest < 512 < step.plan.longest
    assert torch.equal(paged_attention(step.q_TAD[:1], step.cache, alone, window, SCALE)[0], before_TQ[0])
    chunk = plan_paged([SequenceSlice(0, 9, step.tables[2])], 4, CPU)
    assert torch.equal(paged_attention(step.q_TAD[2:], step.cache, chunk, window, SCALE), before_TQ[2:])


def test_the_plan() -> None:
    slices = [SequenceSlice(2, 1, [3, 1, 2]), SequenceSlice(3, 3, [4, 0, 9])]
    plan = plan_paged(slices, 4, CPU)
    assert plan.table_SW.tolist() == [[3, 1], [4, 0]]
    assert plan.positions_T.tolist() == [2, 3, 4, 5] and plan.slots_T.tolist() == [14, 19, 0, 1]
    assert (plan.length_S.tolist(), plan.count_S.tolist(), plan.first_row_S.tolist()) == ([3, 6], [1, 3], [0, 1])
    assert (plan.decode_rows, plan.longest, plan.most) == (1, 3, 3)
    assert len(paged_attention(torch.empty(0, 2, 8), empty_cache(), plan_paged([], 4, CPU), None, 1.0)) == 0


def empty_cache() -> Cache:
    return Cache(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))


def test_scales_go_with_eight_bits_and_with_nothing_else() -> None:
    with pytest.raises(ValueError, match=r"a torch\.float32 cache has no scales"):
        replace(empty_cache(), key_scale_G=torch.ones(1), value_scale_G=torch.ones(1))
    with pytest.raises(ValueError, match=r"a torch\.int8 cache needs scales"):
        Cache(torch.zeros(1, 2, 4, 8, dtype=torch.int8), torch.zeros(1, 2, 4, 8, dtype=torch.int8))
