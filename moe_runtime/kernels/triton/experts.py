"""A layer's experts on the device: sort, two grouped products, sum. Nothing here reads a number back.

Legend: T tokens, K picks of a token, H hidden, I intermediate, P = T * K picks, R = P rows by expert (sort.py),
D columns.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moe_runtime.kernels.triton.grouped_gemm import grouped_gemm
from moe_runtime.kernels.triton.launch import Call, dot_precision, dot_type, power_of_two, processors
from moe_runtime.kernels.triton.rows import add_picks, round_rows
from moe_runtime.kernels.triton.sort import SortedPicks, sort_picks
from moe_runtime.kernels.triton.tiles import Tile
from moe_runtime.kernels.triton.weights import Operand

_BAND = 8


@dataclass(frozen=True)
class Rows:
    """The left side of a product. scale_R: of int8 rows. gather: row r is x[pick // picks of a token]; else x[r]."""

    x: Tensor
    scale_R: Tensor | None = None
    gather: bool = False


def run_experts(
    x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, gate_up: Operand, down: Operand, tiles: tuple[Tile, Tile]
) -> Tensor:
    """Sum over k of weights[t, k] * down(silu(gate(x)) * up(x)) by expert slots[t, k], [T, H] in x's dtype.

    Both tiles have one BLOCK_M. Slots outside 0..E-1 are picks that are elsewhere.
    """
    (tokens, hidden), picks = x_TH.shape, slots_TK.shape[1]
    if not tokens * picks:
        return torch.zeros_like(x_TH)
    assert tiles[0].block_m == tiles[1].block_m and hidden == gate_up.columns == down.rows
    x_TH = x_TH.contiguous()
    by_expert = sort_picks(slots_TK, len(gate_up.units_ENU), tiles[0].block_m)
    dtype = result_dtype(x_TH, gate_up)
    rows = left_side(x_TH, gate_up, gather=True)
    hidden_RI = x_TH.new_empty(tokens * picks, gate_up.rows // 2, dtype=dtype)
    multiply(hidden_RI, rows, gate_up, tiles[0], by_expert, gate_up=True, picks=picks)()
    rows = left_side(hidden_RI, down, by_expert.used_2)
    out_RH = x_TH.new_empty(tokens * picks, hidden, dtype=dtype)
    multiply(out_RH, rows, down, tiles[1], by_expert, pick_weights=weights_TK.contiguous(), picks=picks)()
    out_TH = torch.empty_like(x_TH)
    sum_picks(out_TH, out_RH, by_expert.row_P)()
    return out_TH


def left_side(x_RD: Tensor, weights: Operand, used_2: Tensor | None = None, gather: bool = False) -> Rows:
    """Rows as these weights want them, rounded where the format says so; used_2 says how many there are."""
    if weights.format.activations != "int8":
        return Rows(x_RD, None, gather)
    codes_RD, scale_R = round_to_int8(x_RD, used_2)
    return Rows(codes_RD, scale_R, gather)


def multiply(
    out: Tensor,
    rows: Rows,
    weights: Operand,
    tile: Tile,
    by_expert: SortedPicks | None = None,
    gate_up: bool = False,
    pick_weights: Tensor | None = None,
    bias_N: Tensor | None = None,
    picks: int = 1,
) -> Call:
    """One grouped product into out; without by_expert all rows belong to the first expert."""
    form, x, units = weights.format, rows.x, weights.units_ENU
    outputs, count = weights.rows // (2 if gate_up else 1), len(out)
    order: tuple[Tensor | None, ...] = (None,) * 6
    blocks = triton.cdiv(count, tile.block_m)
    if by_expert:
        blocks = len(by_expert.expert_B)
        described = (by_expert.expert_B, by_expert.first_B, by_expert.last_B, by_expert.used_2)
        order = (by_expert.pick_R, pick_weights, *described)
    pointers = (out, x, rows.scale_R, units, weights.scales_ERC, weights.zeros_ERC, bias_N, *order)
    args = (
        *(units if pointer is None else pointer for pointer in pointers),
        *(count, outputs, weights.columns, picks),
        *(x.stride(0), out.stride(0), units.stride(1), units.stride(0)),
        *(weights.scales_ERC.stride(1), weights.scales_ERC.stride(0)),
    )
    constants = {
        "SORTED": by_expert is not None,
        "GATHER": rows.gather,
        "GATE_UP": gate_up,
        "WEIGHTED": pick_weights is not None,
        "BIAS": bias_N is not None,
        "VALUES": "int4z" if form.zero_points else form.values,
        "ROUND_X": rows.scale_R is not None,
        "GROUP_N": form.group[0] or weights.rows,
        "GROUP_K": form.group[1],
        "E8M0": form.scales is torch.uint8,
        "DOT": dot_type(x.dtype if form.quantized else torch.promote_types(x.dtype, form.dtype)),
        "PRECISION": dot_precision(),
        "EVEN_K": weights.columns % tile.block_k == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BAND": _BAND,
    }
    tiles = blocks * triton.cdiv(outputs, tile.block_n)
    grid = (min(tiles, processors(x.device)) if tile.persistent else tiles,)
    return Call(grouped_gemm, grid, args, constants, tile.warps, tile.stages)


def result_dtype(x: Tensor, weights: Operand) -> torch.dtype:
    """The dtype of intermediate rows: x's, or a wider one of plain weights."""
    return x.dtype if weights.format.quantized else torch.promote_types(x.dtype, weights.format.dtype)


def round_to_int8(x_RD: Tensor, used_2: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(int8 rows, their scales); used_2 says how many there are, where not all of them are used."""
    rows, columns = x_RD.shape
    codes_RD, scale_R = x_RD.new_empty(rows, columns, dtype=torch.int8), x_RD.new_empty(rows, dtype=torch.float32)
    rounding(codes_RD, scale_R, x_RD, used_2)()
    return codes_RD, scale_R


def rounding(codes_RD: Tensor, scale_R: Tensor, x_RD: Tensor, used_2: Tensor | None) -> Call:
    rows, columns = x_RD.shape
    pointers = (codes_RD, scale_R, x_RD, codes_RD if used_2 is None else used_2)
    constants = {"COUNTED": used_2 is not None, "BLOCK": min(4096, power_of_two(columns))}
    args = (*pointers, rows, columns, x_RD.stride(0), codes_RD.stride(0))
    return Call(round_rows, (rows,), args, constants)


def sum_picks(out_TH: Tensor, out_RH: Tensor, row_P: Tensor) -> Call:
    tokens, hidden = out_TH.shape
    picks, block = len(row_P) // tokens, min(1024, power_of_two(hidden))
    args = (out_TH, out_RH, row_P, hidden, picks, out_RH.stride(0), out_TH.stride(0))
    return Call(add_picks, (tokens, triton.cdiv(hidden, block)), args, {"PICKS": power_of_two(picks), "BLOCK": block})
