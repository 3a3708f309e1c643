"""Attention over a paged KV cache: the plan of a step, and the kernel that serves it on this device.

Legend: T tokens, A query heads, G kv heads, D head dimension, N blocks, B tokens a block. Tokens of a step lie in this
order: one-token slices first (decode), then chunks. A plan is made once a step and serves every layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_runtime.kernels.attention_plan import AttentionShape, SequenceSlice, SliceTable, to_device
from moe_runtime.kernels.native.attention import can_attend, native_attention
from moe_runtime.kernels.plain_attention import PlainLayout, plain_attention, plain_layout


@dataclass(frozen=True)
class AttentionPlan:
    """Where each token goes and what it may see. positions_T and slots_T (block * B + offset) are int64."""

    shape: AttentionShape
    positions_T: Tensor
    slots_T: Tensor
    table: SliceTable
    slices: Sequence[SequenceSlice]

    @cached_property
    def plain(self) -> PlainLayout:
        """What the plain kernel needs besides; made when it is first asked for."""
        return plain_layout(self.slices, self.shape, self.slots_T.device)


def plan_attention(
    slices: Sequence[SequenceSlice],
    block_size: int,
    heads: int,
    kv_heads: int,
    windows: Iterable[int | None],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Lay out a step; slices of one token must come first. windows: the distinct sliding windows of the model's
    layers.
    """
    shape = AttentionShape(block_size, heads, kv_heads, tuple(dict.fromkeys(windows)), dtype)
    table = SliceTable.of(slices, block_size)
    positions_T, slots_T = table.positions_and_slots(block_size)
    return AttentionPlan(shape, to_device(positions_T, device), to_device(slots_T, device), table, slices)


def paged_attention(
    q_TAD: Tensor, keys_GNBD: Tensor, values_GNBD: Tensor, plan: AttentionPlan, window: int | None, scale: float
) -> Tensor:
    """softmax(q k^T * scale) v over each token's visible cache: [T, A * D]. The step's own k and v are already
    written.
    """
    if can_attend(q_TAD, keys_GNBD):
        return native_attention(q_TAD, keys_GNBD, values_GNBD, plan.table, window, scale)
    return plain_attention(q_TAD, keys_GNBD, values_GNBD, plan.plain, window, scale)
