"""Every kernel on fresh random data against float64: on the GPU at hand, or tiny under the interpreter.

Each check returns the largest error of its cases, and raises AssertionError where a result does not depend on the row
alone: the same row must come out bit for bit the same with other rows beside it.

Legend: T tokens, K picks, H hidden, I intermediate, E experts, L tokens of a request, A query heads, G kv heads, D head
dimension, N blocks, B tokens a block.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.attention_plan import SequenceSlice
from moe_runtime.kernels.bank import BankShape, Weight
from moe_runtime.kernels.triton.bank import TritonBank
from moe_runtime.kernels.triton.launch import INTERPRETED
from moe_runtime.kernels.triton.linear import TritonLinear
from moe_runtime.kernels.triton.paged import Cache, paged_attention, plan_paged
from moe_runtime.kernels.triton.sort import sort_picks
from moe_runtime.quant.formats import Format
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import dequantize

# Of the norm: rounding of what goes in and comes out of two products, and for int8 activations that of these as well.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ROUNDED_LIMIT = 3e-2


@dataclass(frozen=True)
class Sizes:
    """Odd on purpose, so that every tail is met."""

    tokens: tuple[int, ...]
    picks: int
    experts: int
    hidden: int
    intermediate: int
    lengths: tuple[int, ...]
    chunk: int


def sizes(device: torch.device) -> Sizes:
    if device.type == "cuda":
        return Sizes((1, 5, 70, 600), 4, 16, 1096, 712, (1, 40, 513, 3000), 300)
    return Sizes((1, 5), 2, 3, 72, 40, (1, 40, 530), 20)


def limit(form: Format, dtype: torch.dtype) -> float:
    return ROUNDED_LIMIT if form.activations == "int8" else LIMITS[dtype] * (2 if INTERPRETED else 1)


def check_sort(device: torch.device) -> float:
    """0, or the share of rows that are not where a stable sort puts them."""
    size = sizes(device)
    wrong = 0.0
    for tokens in size.tokens:
        slots_TK = torch.randint(-1, size.experts, (tokens, size.picks), device=device)
        found, flat = sort_picks(slots_TK, size.experts, 16), slots_TK.flatten()
        order = torch.sort(flat, stable=True).indices[int((flat < 0).sum()) :]
        assert found.used_2[1] == len(order)
        wrong = max(wrong, float((found.pick_R[: len(order)] != order).float().mean()) if len(order) else 0.0)
    return wrong


def check_experts(form: Format, dtype: torch.dtype, device: torch.device) -> float:
    """The experts of a layer, for several numbers of tokens."""
    size = sizes(device)
    bank, plain = _bank(form, size, device)
    worst, last = 0.0, None
    x_TH = torch.randn(max(size.tokens), size.hidden, device=device).to(dtype)
    slots_TK = torch.randint(-1, size.experts, (len(x_TH), size.picks), device=device)
    weights_TK = torch.rand(len(x_TH), size.picks, device=device)
    exact_TH = _exact_experts(x_TH, slots_TK, weights_TK, plain)
    for tokens in size.tokens:
        y_TH = bank(x_TH[:tokens], slots_TK[:tokens], weights_TK[:tokens])
        worst = max(worst, _error(y_TH, exact_TH[:tokens]))
        # The interpreter multiplies with numpy, which sums in another order for another number of rows.
        if last is not None and not (INTERPRETED and form.activations == "float"):
            assert torch.equal(y_TH[: len(last)], last), f"rows change with {tokens} beside them"
        last = y_TH
    return worst


def check_linear(form: Format, dtype: torch.dtype, device: torch.device) -> float:
    """A linear layer with a bias."""
    size = sizes(device)
    weight, bias_N = (
        _stored(torch.randn(size.intermediate, size.hidden, device=device), form),
        torch.randn(size.intermediate, device=device),
    )
    layer, worst = TritonLinear(weight, bias_N), 0.0
    for tokens in size.tokens:
        x_TH = torch.randn(tokens, size.hidden, device=device).to(dtype)
        worst = max(worst, _error(layer(x_TH), F.linear(x_TH.double(), _plain(weight), bias_N.double())))
    return worst


def check_attention(cache: torch.dtype, dtype: torch.dtype, window: int | None, device: torch.device) -> float:
    """Decode rows of several lengths, and a chunk behind a prefix."""
    size = sizes(device)
    kv_heads, ratio, dim, block = (2, 4, 64, 16) if device.type == "cuda" else (2, 3, 16, 16)
    pieces = [(length - 1, 1) for length in size.lengths] + [(size.chunk // 2, size.chunk)]
    tables, pool = [], 0
    for start, count in pieces:
        needed = -(-(start + count) // block)
        tables.append(list(range(pool, pool + needed))[::-1])
        pool += needed
    held = _random_cache(cache, kv_heads, pool, block, dim, device)
    slices = [SequenceSlice(*piece, table) for piece, table in zip(pieces, tables, strict=True)]
    q_TAD = torch.randn(sum(count for _, count in pieces), kv_heads * ratio, dim, device=device).to(dtype)
    found_TQ = paged_attention(q_TAD, held, plan_paged(slices, block, device), window, dim**-0.5)
    worst, row = 0.0, 0
    for piece, table in zip(pieces, tables, strict=True):
        q_CAD = q_TAD[row : row + piece[1]]
        exact = _exact_attention(q_CAD, held, table, piece[0], window, dim**-0.5)
        worst = max(worst, _error(found_TQ[row : row + piece[1]], exact))
        alone = plan_paged([SequenceSlice(*piece, table)], block, device)
        again = paged_attention(q_CAD, held, alone, window, dim**-0.5)
        assert torch.equal(again, found_TQ[row : row + piece[1]]), "a row changes with others beside it"
        row += piece[1]
    return worst


def _stored(weight_NK: Tensor, form: Format) -> Weight:
    scaled = weight_NK * weight_NK.shape[1] ** -0.5
    return quantize(scaled, form) if form.quantized else scaled.to(form.dtype)


def _plain(weight: Weight) -> Tensor:
    return weight.double() if isinstance(weight, Tensor) else dequantize(weight).double()


def _bank(form: Format, size: Sizes, device: torch.device) -> tuple[TritonBank, list[tuple[Tensor, Tensor]]]:
    bank = TritonBank(BankShape(size.experts, size.hidden, size.intermediate, form), device)
    plain = []
    for position in range(size.experts):
        gate_up = _stored(torch.randn(2 * size.intermediate, size.hidden, device=device), form)
        down = _stored(torch.randn(size.hidden, size.intermediate, device=device), form)
        bank.store(position, gate_up, down)
        plain.append((_plain(gate_up), _plain(down)))
    return bank, plain


def _exact_experts(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, plain: list[tuple[Tensor, Tensor]]) -> Tensor:
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float64, device=x_TH.device)
    for position, (gate_up, down) in enumerate(plain):
        token, pick = (slots_TK == position).nonzero(as_tuple=True)
        gate, up = (x_TH[token].double() @ gate_up.T).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ down.T
        y_TH.index_add_(0, token, out * weights_TK[token, pick, None].double())
    return y_TH


def _random_cache(dtype: torch.dtype, kv_heads: int, blocks: int, block: int, dim: int, device: torch.device) -> Cache:
    shape = (kv_heads, blocks, block, dim)
    scale_G = torch.linspace(0.01, 0.02, kv_heads, device=device)
    if dtype is torch.int8:
        keys, values = torch.randint(-127, 128, (2, *shape), dtype=dtype, device=device)
        return Cache(keys, values, scale_G, scale_G)
    keys, values = torch.randn(2, *shape, device=device)
    if dtype is torch.float8_e4m3fn:
        return Cache((keys * 50).to(dtype), (values * 50).to(dtype), scale_G, scale_G)
    return Cache(keys.to(dtype), values.to(dtype))


def _exact_attention(
    q_CAD: Tensor, held: Cache, table: list[int], start: int, window: int | None, scale: float
) -> Tensor:
    length, heads = start + len(q_CAD), q_CAD.shape[1]

    def plain(pool_GNBD: Tensor, scale_G: Tensor | None) -> Tensor:
        k_GLD = pool_GNBD[:, table].flatten(1, 2)[:, :length].float().double()
        k_GLD = k_GLD if scale_G is None else k_GLD * scale_G.double()[:, None, None]
        return k_GLD.repeat_interleave(heads // len(k_GLD), dim=0)

    age_CL = torch.arange(start, length, device=q_CAD.device)[:, None] - torch.arange(length, device=q_CAD.device)
    hidden_CL = (age_CL < 0) | (age_CL >= (window or length))
    k_ALD, v_ALD = plain(held.keys_GNBD, held.key_scale_G), plain(held.values_GNBD, held.value_scale_G)
    scores_ACL = q_CAD.double().transpose(0, 1) @ k_ALD.transpose(1, 2) * scale
    out_ACD = scores_ACL.masked_fill(hidden_CL, -torch.inf).softmax(-1) @ v_ALD
    return out_ACD.transpose(0, 1).flatten(1)


def _error(found: Tensor, exact: Tensor) -> float:
    """Of the norm; infinite for NaN."""
    error = float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    return error if error == error else float("inf")
