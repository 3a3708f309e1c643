"""Paged attention against plain dense causal attention in float64, one request at a time.

Every slot of the pool that no step has written is NaN, so whatever leaks from padding or a stale block shows.
Legend: T tokens of the step, L tokens of a request, A query heads, G kv heads, D head dimension, N blocks, B tokens a
block.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.kernels.attention_plan import SequenceSlice
from moe_runtime.kernels.paged_attention import paged_attention, plan_attention

CPU = torch.device("cpu")
DIM = 8
SCALE = 0.3


@dataclass(frozen=True)
class Shape:
    block_size: int
    kv_heads: int
    ratio: int
    window: int | None
    dtype: torch.dtype = torch.float64

    @property
    def heads(self) -> int:
        return self.kv_heads * self.ratio


def random_cache(shape: Shape, lengths: Sequence[int], seed: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """A pool of NaN with spare blocks, and a shuffled block table for each request."""
    needed = [-(-length // shape.block_size) for length in lengths]
    ids = list(range(sum(needed) + 5))
    random.Random(seed).shuffle(ids)
    tables = []
    for count in needed:
        tables.append(ids[:count])
        del ids[:count]
    pool = torch.full((shape.kv_heads, sum(needed) + 5, shape.block_size, DIM), float("nan"), dtype=shape.dtype)
    return pool, pool.clone(), tables


def dense(q_CAD: Tensor, k_LGD: Tensor, v_LGD: Tensor, start: int, window: int | None) -> Tensor:
    """Rows start..start+C-1 of one request's causal attention, [C, A, D]."""
    ratio = q_CAD.shape[1] // k_LGD.shape[1]
    k_LAD, v_LAD = k_LGD.repeat_interleave(ratio, 1), v_LGD.repeat_interleave(ratio, 1)
    at_C, at_L = torch.arange(start, start + len(q_CAD)), torch.arange(len(k_LGD))
    age_CL = at_C[:, None] - at_L
    hidden_CL = (age_CL < 0) | (age_CL >= (window or len(k_LGD)))
    scores_ACL = torch.einsum("cad,lad->acl", q_CAD, k_LAD) * SCALE
    return torch.einsum("acl,lad->cad", scores_ACL.masked_fill(hidden_CL, -torch.inf).softmax(-1), v_LAD)


def check(shape: Shape, pieces: Sequence[tuple[int, int]], seed: int, tolerance: float = 1e-12) -> None:
    """pieces: (start, count) of each request, one-token ones first."""
    torch.manual_seed(seed)
    keys, values, tables = random_cache(shape, [start + count for start, count in pieces], seed)
    slices = [SequenceSlice(*piece, table) for piece, table in zip(pieces, tables, strict=True)]
    windows = (None, shape.window, 3)
    plan = plan_attention(slices, shape.block_size, shape.heads, shape.kv_heads, windows, shape.dtype, CPU)
    queries, expected, slots = [], [], []
    for (start, count), table in zip(pieces, tables, strict=True):
        k_LGD, v_LGD = torch.randn(2, start + count, shape.kv_heads, DIM, dtype=torch.float64)
        q_CAD = torch.randn(count, shape.heads, DIM, dtype=torch.float64)
        for position in range(start + count):
            block, offset = table[position // shape.block_size], position % shape.block_size
            keys[:, block, offset], values[:, block, offset] = k_LGD[position], v_LGD[position]
            slots.extend([block * shape.block_size + offset] if position >= start else [])
        queries.append(q_CAD)
        expected.append(dense(q_CAD, k_LGD, v_LGD, start, shape.window))
    assert plan.slots_T.tolist() == slots
    assert plan.positions_T.tolist() == [start + i for start, count in pieces for i in range(count)]
    out_TQ = paged_attention(torch.cat(queries).to(shape.dtype), keys, values, plan, shape.window, SCALE)
    torch.testing.assert_close(
        out_TQ.double(), torch.cat(expected).flatten(1), rtol=tolerance, atol=tolerance, equal_nan=False
    )


shapes = st.builds(
    Shape,
    block_size=st.sampled_from((1, 2, 4, 16)),
    kv_heads=st.sampled_from((1, 2, 3)),
    ratio=st.sampled_from((1, 2, 3)),
    window=st.none() | st.integers(1, 20),
)
decodes = st.lists(st.tuples(st.integers(0, 90), st.just(1)), max_size=9)
chunks = st.lists(st.tuples(st.sampled_from((0, 0, 1, 7, 16, 33)), st.integers(2, 20)), max_size=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shape=shapes, decodes=decodes, chunks=chunks, seed=st.integers(0, 99))
def test_any_step_equals_dense_attention(
    shape: Shape, decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], seed: int
) -> None:
    if decodes or chunks:
        check(shape, [*decodes, *chunks], seed)


def test_lengths_far_apart_are_computed_in_groups_and_come_back_in_order() -> None:
    shape = Shape(block_size=4, kv_heads=2, ratio=2, window=None)
    starts = [100, 0, 3, 55, 1, 7, 99, 2, 30]
    check(shape, [(start, 1) for start in starts], seed=1)
    tables = [list(range(26))] * len(starts)
    slices = [SequenceSlice(start, 1, table) for start, table in zip(starts, tables, strict=True)]
    plan = plan_attention(slices, 4, 4, 2, (None,), torch.float64, CPU)
    rows = [group.rows_Q.tolist() for group in plan.plain.groups if group.rows_Q is not None]
    assert sorted(row for group in rows for row in group) == list(range(len(starts)))
    for group in rows:
        lengths = [starts[row] + 1 for row in group]
        assert max(lengths) <= 2 * min(lengths)


def test_a_short_row_padded_with_its_own_unfinished_block_sees_only_what_is_written() -> None:
    """9 and 17 tokens in blocks of 16 share a group two blocks wide: the short row's padding is itself half empty."""
    check(Shape(block_size=16, kv_heads=1, ratio=3, window=None), [(8, 1), (16, 1)], seed=2)


def test_several_windows_in_one_plan_each_give_their_own_result() -> None:
    for window in (None, 1, 3, 50):
        check(Shape(block_size=4, kv_heads=2, ratio=2, window=window), [(40, 1), (3, 1), (0, 9), (5, 6)], seed=3)


def test_float32_is_close_to_float64() -> None:
    shape = Shape(block_size=16, kv_heads=3, ratio=3, window=None, dtype=torch.float32)
    check(shape, [(200, 1), (17, 1), (0, 40), (31, 9)], seed=4, tolerance=1e-5)


def test_blocks_beyond_the_needed_ones_are_not_read() -> None:
    """A request may hold more blocks than this step's tokens need (admission hands out blocks for the whole prompt)."""
    slices = [SequenceSlice(2, 1, [3, 1, 2]), SequenceSlice(0, 2, [4, 0])]
    plan = plan_attention(slices, 4, 1, 1, (None,), torch.float64, CPU)
    assert [group.blocks_QW.tolist() for group in plan.plain.groups] == [[[3]]]
    assert [chunk.blocks_W.tolist() for chunk in plan.plain.chunks] == [[4]]


@pytest.mark.parametrize("window", [None, 4])
def test_nothing_of_another_request_reaches_a_row(window: int | None) -> None:
    """The same request alone and beside others gives the same bits, whatever the others hold, NaN included."""
    torch.manual_seed(5)
    keys, values = torch.randn(2, 2, 12, 4, DIM)
    slices = [SequenceSlice(9, 1, [7, 2, 5]), SequenceSlice(11, 1, [0, 1, 3])]
    q_TAD = torch.randn(2, 4, DIM)
    plan = plan_attention(slices, 4, 4, 2, (window,), torch.float32, CPU)
    before_Q = paged_attention(q_TAD, keys, values, plan, window, SCALE)[0]
    keys[:, [0, 1, 3]] = values[:, [0, 1, 3]] = float("nan")
    keys[:, 5, 2:] = values[:, 5, 2:] = float("nan")
    assert torch.equal(paged_attention(q_TAD, keys, values, plan, window, SCALE)[0], before_Q)
