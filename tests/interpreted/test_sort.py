"""Picks by expert: order, blocks and places against a plain stable sort. Legend: see kernels/triton/sort.py."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.kernels.triton.sort import SortedPicks, most_blocks, sort_picks


def check(found: SortedPicks, slots_TK: Tensor, experts: int, block_m: int) -> None:
    slots = slots_TK.flatten().tolist()
    order = sorted((slot, pick) for pick, slot in enumerate(slots) if 0 <= slot < experts)
    blocks, rows = found.used_2.tolist()
    assert rows == len(order)
    assert found.pick_R[:rows].tolist() == [pick for _, pick in order]
    place = {pick: row for row, (_, pick) in enumerate(order)}
    assert found.row_P.tolist() == [place.get(pick, -1) for pick in range(len(slots))]
    described = [
        (expert, row)
        for expert, first, last in zip(found.expert_B, found.first_B, found.last_B, strict=True)
        if expert >= 0
        for row in range(first, min(first + block_m, last))
    ]
    assert described == [(slot, row) for row, (slot, _) in enumerate(order)]
    assert found.expert_B[blocks:].eq(-1).all() and found.expert_B[:blocks].ge(0).all()
    assert len(found.expert_B) == most_blocks(len(slots), experts, block_m)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 40), st.integers(1, 9), st.integers(1, 70), st.sampled_from([1, 2, 16, 64]), st.integers(0, 99),
    st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_any_picks(tokens: int, picks: int, experts: int, block_m: int, seed: int, dtype: torch.dtype) -> None:
    """Among them ids that no expert has, of which -1 is the usual one."""
    random = torch.Generator().manual_seed(seed)
    slots_TK = torch.randint(-1, experts + 1, (tokens, picks), generator=random).to(dtype)
    check(sort_picks(slots_TK, experts, block_m), slots_TK, experts, block_m)


def test_all_on_one_expert_none_at_all_and_more_blocks_than_chunks() -> None:
    for slots_TK, experts, block_m in (
        (torch.full((300, 2), 3), 5, 16),
        (torch.full((7, 2), -1), 5, 16),
        (torch.arange(200).view(100, 2), 200, 1),
        (torch.zeros(1, 1, dtype=torch.int64), 1, 128),
    ):
        check(sort_picks(slots_TK, experts, block_m), slots_TK, experts, block_m)
