"""Every kernel at the sizes of well-known models, as calls on tensors without memory: to compile, count and report.

Legend: T tokens, K picks, H hidden, I intermediate, E experts, P = T * K picks, A query heads, G kv heads, D head
dimension, S sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.triton import paged
from moe_runtime.kernels.triton.compile import Target
from moe_runtime.kernels.triton.experts import Rows, multiply, rounding, sum_picks
from moe_runtime.kernels.triton.launch import Call, power_of_two
from moe_runtime.kernels.triton.sort import SortedPicks, most_blocks, sort_calls
from moe_runtime.kernels.triton.tiles import Product, Tile, choose_tile
from moe_runtime.kernels.triton.weights import Operand, WeightStack
from moe_runtime.quant.formats import FORMATS, Format

_META = torch.device("meta")


@dataclass(frozen=True)
class ModelShape:
    """attention: (query heads, kv heads, head dimension, window), None where it is not of this kind."""

    hidden: int
    intermediate: int
    experts: int
    picks: int
    attention: tuple[int, int, int, int | None] | None


MODELS = {
    "DeepSeek-V3": ModelShape(7168, 2048, 256, 8, None),
    "Qwen3-235B": ModelShape(4096, 1536, 128, 8, (64, 4, 128, None)),
    "Mixtral-8x7B": ModelShape(4096, 14336, 8, 2, (32, 8, 128, None)),
    "gpt-oss-120b": ModelShape(2880, 2880, 128, 4, (64, 8, 64, 128)),
}
LINEAR_FORMATS = tuple(name for name in FORMATS if name == "w8a16" or name.startswith("w4a16"))
CACHE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Case:
    """A kernel in a model, with the tile that was chosen where there was a choice."""

    kernel: str
    format: str
    call: Call
    tile: Tile | None = None


def expert_cases(
    shape: ModelShape,
    form: Format,
    tokens: int,
    architecture: str,
    tiles: tuple[Tile, Tile] | None = None,
    activations: torch.dtype = torch.bfloat16,
) -> Iterator[Case]:
    """The products of one layer, and for int8 activations the kernels that round rows.

    activations: the model's dtype where the weights are quantized; plain weights have their own.
    """
    picks, experts, rounds = tokens * shape.picks, shape.experts, form.activations == "int8"
    dtype = activations if form.quantized else form.dtype
    first, second = tiles or (
        choose_tile(Product(form, "gate_up", experts, shape.intermediate, shape.hidden), picks, architecture, False),
        choose_tile(Product(form, "down", experts, shape.hidden, shape.intermediate), picks, architecture, False),
    )
    by_expert = _sorted(picks, experts, first.block_m)
    gate_up, down = operands(shape, form)
    x_TH, hidden_PI = _empty(tokens, shape.hidden, dtype=dtype), _empty(picks, shape.intermediate, dtype=dtype)
    x, hidden = Rows(x_TH, gather=True), Rows(hidden_PI)
    if rounds:
        codes, scales = _empty(tokens, shape.hidden, dtype=torch.int8), _empty(tokens, dtype=torch.float32)
        x = Rows(codes, scales, gather=True)
        yield Case("round tokens", form.name, rounding(codes, scales, x_TH, None))
        codes, scales = _empty(picks, shape.intermediate, dtype=torch.int8), _empty(picks, dtype=torch.float32)
        hidden = Rows(codes, scales)
        yield Case("round hidden", form.name, rounding(codes, scales, hidden_PI, by_expert.used_2))
    call = multiply(hidden_PI, x, gate_up, first, by_expert, gate_up=True, picks=shape.picks)
    yield Case("gate_up", form.name, call, first)
    weights_TK, out_PH = _empty(tokens, shape.picks, dtype=torch.float32), _empty(picks, shape.hidden, dtype=dtype)
    call = multiply(out_PH, hidden, down, second, by_expert, pick_weights=weights_TK, picks=shape.picks)
    yield Case("down", form.name, call, second)


def operands(shape: ModelShape, form: Format) -> tuple[Operand, Operand]:
    """Both weights of all experts, without memory."""
    gate_up = WeightStack(form, shape.experts, 2 * shape.intermediate, shape.hidden, _META)
    return gate_up.operand, WeightStack(form, shape.experts, shape.hidden, shape.intermediate, _META).operand


def routing_cases(shape: ModelShape, tokens: int) -> Iterator[Case]:
    """Sorting and summing, which know no formats."""
    picks = tokens * shape.picks
    slots_TK = _empty(tokens, shape.picks, dtype=torch.int64)
    by_expert = _sorted(picks, shape.experts, 16)
    count, place = sort_calls(slots_TK, shape.experts, _empty(picks * shape.experts), by_expert)
    yield Case("count picks", "", count)
    yield Case("place picks", "", place)
    out_TH, out_PH = (
        _empty(tokens, shape.hidden, dtype=torch.bfloat16),
        _empty(picks, shape.hidden, dtype=torch.bfloat16),
    )
    yield Case("sum picks", "", sum_picks(out_TH, out_PH, by_expert.row_P))


def expected_instruction(case: Case, target: Target) -> str | None:
    """How the name begins of the instruction that makes this case's products; None where there are none."""
    if case.kernel not in ("gate_up", "down", "linear", "attention decode", "attention chunk"):
        return None
    if target.gpu.backend == "hip":
        return target.tensor
    if case.format == "w8a8" and target.name == "sm_100":
        # Triton translates int8 products to the older instruction there.
        return "mma.sync"
    attention = case.kernel.startswith("attention")
    # The asynchronous instructions want 64 rows on the left, where attention has its queries.
    few = attention and (case.kernel == "attention decode" or case.format == "float32")
    return "mma.sync" if few else target.tensor


def linear_case(rows: int, columns: int, form: Format, tokens: int, architecture: str) -> Case:
    """One linear layer."""
    weights = WeightStack(form, 1, rows, columns, _META).operand
    tile = choose_tile(Product(form, "linear", 1, rows, columns), tokens, architecture, False)
    x_TK, out_TN = _empty(tokens, columns, dtype=torch.bfloat16), _empty(tokens, rows, dtype=torch.bfloat16)
    return Case("linear", form.name, multiply(out_TN, Rows(x_TK), weights, tile), tile)


def attention_cases(shape: ModelShape, cache: str, architecture: str, chunk: int = 1024) -> Iterator[Case]:
    """Decode of a row with several pieces, and a chunk of a prompt behind a prefix."""
    assert shape.attention is not None
    heads, kv_heads, dim, window = shape.attention
    dtype = CACHE_DTYPES[cache]
    scaled = dtype.itemsize == 1
    scale = _empty(kv_heads, dtype=torch.float32) if scaled else None
    pool = _empty(kv_heads, 1024, 16, dim, dtype=dtype)
    q_TAD = _empty(chunk, heads, dim, dtype=torch.bfloat16 if scaled else dtype)
    out_TAD, ints_S = torch.empty_like(q_TAD), _empty(1)
    layout = (_empty(1, 256), ints_S, ints_S, ints_S)
    positions_T = _empty(chunk, dtype=torch.int64)
    decode = paged.PagedPlan(positions_T, positions_T, *layout, decode_rows=1, longest=4096, most=0)
    chunked = paged.PagedPlan(positions_T, positions_T, *layout, decode_rows=0, longest=0, most=chunk)
    held = paged.Cache(pool, pool, scale, scale)
    pieces, join = paged.decode_calls(out_TAD, q_TAD, held, decode, window, dim**-0.5)
    yield Case("attention decode", cache, pieces)
    yield Case("attention join", cache, join)
    tile = paged.chunk_tile(power_of_two(heads // kv_heads), dim, q_TAD.dtype, architecture)
    yield Case("attention chunk", cache, paged.chunk_call(out_TAD, q_TAD, held, chunked, window, dim**-0.5, tile))


def _sorted(picks: int, experts: int, block_m: int) -> SortedPicks:
    blocks = most_blocks(picks, experts, block_m)
    return SortedPicks(
        *(_empty(picks), _empty(picks), _empty(blocks), _empty(blocks), _empty(blocks), _empty(2)), block_m
    )


def _empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device=_META)
