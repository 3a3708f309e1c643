"""The plan of a step for the attention kernels, and their launches. The plain twin is kernels/paged_attention.py.

Legend: T tokens, A query heads, G kv heads, D head dimension, N blocks, B tokens a block, S sequences, W table width,
R = A / G query heads of a kv head. Tokens of a step lie as there: one-token slices first, then chunks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moe_runtime.kernels.attention_plan import SequenceSlice
from moe_runtime.kernels.triton.attention import attend_chunks, decode_pieces, join_pieces
from moe_runtime.kernels.triton.launch import Call, architecture, dot_precision, dot_type, power_of_two

# Cache positions that one program of a decode step walks over. Fixed: how a row is summed must depend on nothing else.
PIECE = 512
_KV_VALUES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


@dataclass(frozen=True)
class PagedPlan:
    """A step's layout. table_SW, length_S (with this step's tokens), count_S and first_row_S are int32 on the device.

    positions_T and slots_T (block * B + offset) are int64. longest: of decode rows; most: tokens of a chunk.
    """

    positions_T: Tensor
    slots_T: Tensor
    table_SW: Tensor
    length_S: Tensor
    count_S: Tensor
    first_row_S: Tensor
    decode_rows: int
    longest: int
    most: int


def plan_paged(slices: Sequence[SequenceSlice], block_size: int, device: torch.device) -> PagedPlan:
    """Lay out a step; slices of one token must come first."""
    decode_rows = next((i for i, piece in enumerate(slices) if piece.count > 1), len(slices))
    assert all(piece.count > 1 for piece in slices[decode_rows:]), "slices of one token must come first"
    lengths = [piece.start + piece.count for piece in slices]
    width = max((-(-length // block_size) for length in lengths), default=0)
    tables = [[*piece.blocks[:width], *[0] * (width - len(piece.blocks))] for piece in slices]
    spots = [(piece, piece.start + offset) for piece in slices for offset in range(piece.count)]
    slots = [piece.blocks[at // block_size] * block_size + at % block_size for piece, at in spots]
    counts = [piece.count for piece in slices]
    firsts = [sum(counts[:index]) for index in range(len(counts))]

    def ints(values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return PagedPlan(
        ints([at for _, at in spots], torch.int64),
        ints(slots, torch.int64),
        ints(tables).view(len(slices), width),
        ints(lengths),
        ints(counts),
        ints(firsts),
        decode_rows,
        max(lengths[:decode_rows], default=0),
        max(counts[decode_rows:], default=0),
    )


@dataclass(frozen=True)
class Cache:
    """One layer's pool, [G, N, B, D] in float32, bfloat16, float16, or int8 / float8_e4m3fn with a scale a kv head."""

    keys_GNBD: Tensor
    values_GNBD: Tensor
    key_scale_G: Tensor | None = None
    value_scale_G: Tensor | None = None

    def __post_init__(self) -> None:
        scaled = self.keys_GNBD.dtype in _KV_VALUES
        given = self.key_scale_G is not None and self.value_scale_G is not None
        if scaled != given:
            raise ValueError(
                f"a {self.keys_GNBD.dtype} cache {'needs' if scaled else 'has no'} scales of keys and values"
            )

    @property
    def units(self) -> tuple[Tensor, Tensor]:
        """As the kernels read them: two eight-bit numbers in an int16."""
        if self.keys_GNBD.dtype not in _KV_VALUES:
            return self.keys_GNBD, self.values_GNBD
        return self.keys_GNBD.view(torch.int16), self.values_GNBD.view(torch.int16)


@dataclass(frozen=True)
class AttentionTile:
    """rows: of queries (tokens by heads of a kv head, padded), at least 16; positions: of the cache."""

    rows: int
    positions: int
    warps: int
    stages: int


def paged_attention(q_TAD: Tensor, cache: Cache, plan: PagedPlan, window: int | None, scale: float) -> Tensor:
    """softmax(q k^T * scale) v over each token's visible cache: [T, A * D]. The step's own k and v are already written.

    window: how many positions a token sees, its own among them; None: all.
    """
    q_TAD = q_TAD.contiguous()
    out_TAD = torch.empty_like(q_TAD)
    if plan.decode_rows:
        for call in decode_calls(out_TAD, q_TAD, cache, plan, window, scale):
            call()
    if plan.most:
        chunk_call(out_TAD, q_TAD, cache, plan, window, scale)()
    return out_TAD.flatten(1)


def decode_calls(
    out_TAD: Tensor, q_TAD: Tensor, cache: Cache, plan: PagedPlan, window: int | None, scale: float
) -> list[Call]:
    """The one-token rows."""
    _, heads, dim = q_TAD.shape
    kv_heads, rows, pieces = len(cache.keys_GNBD), plan.decode_rows, triton.cdiv(plan.longest, PIECE)
    tile = decode_tile(heads // kv_heads, dim, q_TAD.dtype)
    sums = q_TAD.new_empty((rows, heads, pieces, dim) if pieces > 1 else 0, dtype=torch.float32)
    most, weight = q_TAD.new_empty(2, rows * heads * pieces if pieces > 1 else 0, dtype=torch.float32)
    common = _common(q_TAD, cache, window)
    args = (
        *(sums, most, weight, out_TAD, q_TAD, *_pools(cache, plan), plan.table_SW, plan.length_S),
        *(scale * math.log2(math.e), window or 0, pieces, *_strides(q_TAD, cache, plan)),
    )
    constants = {**common, "QUERIES": tile.rows, "WHOLE": pieces == 1, "PIECE": PIECE, "TILE": tile.positions}
    calls = [Call(decode_pieces, (rows, kv_heads, pieces), args, constants, tile.warps, tile.stages)]
    if pieces > 1:
        constants = {key: common[key] for key in ("DIM", "PADDED", "WINDOWED")}
        args = (out_TAD, sums, most, weight, plan.length_S, window or 0, pieces, heads)
        calls.append(Call(join_pieces, (rows, heads), args, {**constants, "PIECE": PIECE}))
    return calls


def chunk_call(
    out_TAD: Tensor,
    q_TAD: Tensor,
    cache: Cache,
    plan: PagedPlan,
    window: int | None,
    scale: float,
    tile: AttentionTile | None = None,
) -> Call:
    """The slices of more than one token."""
    _, heads, dim = q_TAD.shape
    kv_heads, chunks = len(cache.keys_GNBD), slice(plan.decode_rows, None)
    queries = power_of_two(heads // kv_heads)
    tile = tile or chunk_tile(queries, dim, q_TAD.dtype, architecture(q_TAD.device))
    tokens = tile.rows // queries
    described = (plan.table_SW[chunks], plan.length_S[chunks], plan.count_S[chunks], plan.first_row_S[chunks])
    args = (
        *(out_TAD, q_TAD, *_pools(cache, plan), *described),
        *(scale * math.log2(math.e), window or 0, *_strides(q_TAD, cache, plan)),
    )
    sizes = {"QUERIES": queries, "TOKENS": tokens, "TILE": tile.positions}
    grid = (triton.cdiv(plan.most, tokens), len(described[1]), kv_heads)
    return Call(attend_chunks, grid, args, {**_common(q_TAD, cache, window), **sizes}, tile.warps, tile.stages)


def decode_tile(ratio: int, dim: int, dtype: torch.dtype) -> AttentionTile:
    """More positions where a head is short; full precision takes three products and the registers of three."""
    positions = 128 if dim <= 64 else 64
    return AttentionTile(max(16, power_of_two(ratio)), positions // (4 if dtype is torch.float32 else 1), 4, 2)


def chunk_tile(queries: int, dim: int, dtype: torch.dtype, architecture: str) -> AttentionTile:
    """128 rows where accumulators of 64 rows are one instruction's, 64 elsewhere; `queries` rows are one token's."""
    if dtype is torch.float32:
        return AttentionTile(max(16, queries), 32, 4, 1)
    if architecture in ("sm_90", "sm_100") and dim <= 128:
        return AttentionTile(max(128, queries), 64, 8, 2)
    return AttentionTile(max(64, queries), 64 if architecture.startswith("gfx") else 32, 4, 2)


def _pools(cache: Cache, plan: PagedPlan) -> tuple[Tensor, ...]:
    keys, values = cache.units
    key_scale, value_scale = cache.key_scale_G, cache.value_scale_G
    return keys, values, keys if key_scale is None else key_scale, values if value_scale is None else value_scale


def _strides(q_TAD: Tensor, cache: Cache, plan: PagedPlan) -> tuple[int, ...]:
    keys, values = cache.units
    assert keys.stride() == values.stride() and keys.stride(1) == keys.stride(2) * keys.shape[2]
    return q_TAD.stride(0), keys.stride(0), keys.stride(2), plan.table_SW.stride(0), q_TAD.shape[1]


def _common(q_TAD: Tensor, cache: Cache, window: int | None) -> dict[str, object]:
    _, heads, dim = q_TAD.shape
    kv_heads, _, page, _ = cache.keys_GNBD.shape
    return {
        "RATIO": heads // kv_heads,
        "DIM": dim,
        "PADDED": max(16, power_of_two(dim)),
        "PAGE": page,
        "VALUES": _KV_VALUES.get(cache.keys_GNBD.dtype, "float"),
        "SCALED": cache.key_scale_G is not None,
        "WINDOWED": window is not None,
        "DOT": dot_type(q_TAD.dtype),
        "PRECISION": dot_precision(),
    }
