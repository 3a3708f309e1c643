"""Paged attention in plain torch: what every other kernel must equal, and what serves where there is none.

Decode rows of similar length are computed together, chunks one by one, over gathered copies of their blocks.
Legend: T tokens, A query heads, G kv heads, R = A / G, D head dimension, N blocks, B tokens a block, W block table
width, S = W * B gathered tokens, Q rows of a decode group, C tokens of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.attention_plan import AttentionShape, SequenceSlice

# A decode group holds rows whose lengths differ by at most this factor, which bounds the work lost to padding.
_LENGTH_SPREAD = 2


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows of similar length. rows_Q is None when the group is all decode rows in order.

    unwritten: gathered slots, counted over all Q * S, that hold whatever a former owner of the block left there.
    """

    rows_Q: Tensor | None
    blocks_QW: Tensor
    unwritten: Tensor
    # Per sliding window: 0 where a row may look, -inf elsewhere; [G * Q, R, S].
    masks: dict[int | None, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Several tokens of one request. A mask is None when plain causality says all: [C, S] otherwise."""

    first_row: int
    count: int
    blocks_W: Tensor
    masks: dict[int | None, Tensor | None]


@dataclass(frozen=True)
class PlainLayout:
    """A step's decode groups and chunks."""

    decode_rows: int
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def plain_layout(slices: Sequence[SequenceSlice], shape: AttentionShape, device: torch.device) -> PlainLayout:
    """Index tensors and masks of a step; slices of one token come first."""
    decode_rows = next((i for i, piece in enumerate(slices) if piece.count > 1), len(slices))
    groups = tuple(
        _decode_group(rows, slices, decode_rows, shape, device)
        for rows in _by_length([piece.start + 1 for piece in slices[:decode_rows]])
    )
    chunks, first_row = [], decode_rows
    for piece in slices[decode_rows:]:
        chunks.append(_chunk(piece, first_row, shape, device))
        first_row += piece.count
    return PlainLayout(decode_rows, groups, tuple(chunks))


def plain_attention(
    q_TAD: Tensor, keys_GNBD: Tensor, values_GNBD: Tensor, layout: PlainLayout, window: int | None, scale: float
) -> Tensor:
    """See kernels.paged_attention."""
    out_TAD = torch.empty_like(q_TAD)
    for group in layout.groups:
        rows = slice(0, layout.decode_rows) if group.rows_Q is None else group.rows_Q
        out_TAD[rows] = _decode(q_TAD[rows], keys_GNBD, values_GNBD, group, window, scale)
    for chunk in layout.chunks:
        rows = slice(chunk.first_row, chunk.first_row + chunk.count)
        out_TAD[rows] = _prefill(q_TAD[rows], keys_GNBD, values_GNBD, chunk, window, scale)
    return out_TAD.view(len(q_TAD), -1)


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers grouped so that within a group the longest is at most _LENGTH_SPREAD times the shortest."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    groups: list[list[int]] = []
    for row in order:
        if groups and lengths[row] <= _LENGTH_SPREAD * lengths[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group) for group in groups]


def _decode_group(
    rows: Sequence[int],
    slices: Sequence[SequenceSlice],
    decode_rows: int,
    shape: AttentionShape,
    device: torch.device,
) -> DecodeGroup:
    block_size, heads, kv_heads = shape.block_size, shape.heads, shape.kv_heads
    lengths = [slices[row].start + 1 for row in rows]
    width = -(-max(lengths) // block_size)
    tables = [list(slices[row].blocks[:width]) for row in rows]
    blocks_QW = torch.tensor([table + [table[0]] * (width - len(table)) for table in tables], device=device)
    length_Q1 = torch.tensor(lengths, device=device).unsqueeze(1)
    masks: dict[int | None, Tensor] = {}
    for window in shape.windows:
        at_S = torch.arange(width * block_size, device=device)
        visible_QS = at_S < length_Q1
        if window is not None:
            visible_QS &= at_S >= length_Q1 - window
        mask_QS = _additive(visible_QS, shape.dtype)
        expanded = mask_QS.view(1, len(rows), 1, -1).expand(kv_heads, -1, heads // kv_heads, -1)
        masks[window] = expanded.reshape(kv_heads * len(rows), heads // kv_heads, -1)
    everyone = len(rows) == decode_rows
    unwritten = torch.tensor(_unwritten(lengths, width, block_size), dtype=torch.int64, device=device)
    return DecodeGroup(None if everyone else torch.tensor(rows, device=device), blocks_QW, unwritten, masks)


def _unwritten(lengths: Sequence[int], width: int, block_size: int) -> list[int]:
    """The end of each row's last block, and of the copies of it that pad the table of a row with one block."""
    slots: list[int] = []
    for row, length in enumerate(lengths):
        first = row * width * block_size
        filled = -(-length // block_size)
        for block in range(filled - 1, width if filled == 1 else filled):
            slots += range(first + block * block_size + (length - 1) % block_size + 1, first + (block + 1) * block_size)
    return slots


def _chunk(
    piece: SequenceSlice,
    first_row: int,
    shape: AttentionShape,
    device: torch.device,
) -> Chunk:
    end = piece.start + piece.count
    blocks_W = torch.tensor(piece.blocks[: -(-end // shape.block_size)], device=device)
    masks: dict[int | None, Tensor | None] = {}
    for window in shape.windows:
        if piece.start == 0 and (window is None or window >= end):
            masks[window] = None
            continue
        position_C1 = torch.arange(piece.start, end, device=device).unsqueeze(1)
        at_S = torch.arange(end, device=device)
        visible_CS = at_S <= position_C1
        if window is not None:
            visible_CS &= at_S > position_C1 - window
        masks[window] = _additive(visible_CS, shape.dtype)
    return Chunk(first_row, piece.count, blocks_W, masks)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _decode(
    q_QAD: Tensor, keys_GNBD: Tensor, values_GNBD: Tensor, group: DecodeGroup, window: int | None, scale: float
) -> Tensor:
    rows, heads, dim = q_QAD.shape
    kv_heads, _, block_size, _ = keys_GNBD.shape
    flat_blocks, tokens = group.blocks_QW.view(-1), group.blocks_QW.shape[1] * block_size
    k, v = (
        # A masked score has probability 0, but 0 * NaN is NaN: what is left in a block must not reach its next owner.
        pool_GNBD.index_select(1, flat_blocks)
        .view(kv_heads, rows * tokens, dim)
        .index_fill_(1, group.unwritten, 0.0)
        .view(kv_heads * rows, tokens, dim)
        for pool_GNBD in (keys_GNBD, values_GNBD)
    )
    q = q_QAD.view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads * rows, -1, dim)
    scores = torch.baddbmm(group.masks[window], q, k.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), v)
    return out.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads, dim)


def _prefill(
    q_CAD: Tensor, keys_GNBD: Tensor, values_GNBD: Tensor, chunk: Chunk, window: int | None, scale: float
) -> Tensor:
    kv_heads, _, _, dim = keys_GNBD.shape
    mask_CS = chunk.masks[window]
    tokens = chunk.count if mask_CS is None else mask_CS.shape[1]
    k_1GSD = keys_GNBD.index_select(1, chunk.blocks_W).view(1, kv_heads, -1, dim)[:, :, :tokens]
    v_1GSD = values_GNBD.index_select(1, chunk.blocks_W).view(1, kv_heads, -1, dim)[:, :, :tokens]
    out_1ACD = F.scaled_dot_product_attention(
        q_CAD.transpose(0, 1).unsqueeze(0),
        k_1GSD,
        v_1GSD,
        attn_mask=mask_CS,
        is_causal=mask_CS is None,
        scale=scale,
        enable_gqa=True,
    )
    return out_1ACD.squeeze(0).transpose(0, 1)
