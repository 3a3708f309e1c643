"""Plain torch in float64, one pick at a time, and random experts to try.

Legend: T tokens, K picks, H hidden, I intermediate, N outputs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.bank import BankShape, Weight
from moe_runtime.kernels.triton.bank import TritonBank
from moe_runtime.kernels.triton.tiles import Tile
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import dequantize

CPU = torch.device("cpu")
# Of the sums of magnitudes. Intermediate rows are kept in the model's dtype, and the interpreter cuts bfloat16 off
# instead of rounding it.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 2e-3, torch.bfloat16: 0.02}
# The int8 format rounds what goes into each product as well.
ROUNDED_TOLERANCE = 0.03

Expert = tuple[Weight, Weight]


def plain(weight: Weight) -> Tensor:
    return weight.double() if isinstance(weight, Tensor) else dequantize(weight).double()


def stored(weight_NK: Tensor, name: str) -> Weight:
    form = FORMATS[name]
    return quantize(weight_NK, form) if form.quantized else weight_NK.to(form.dtype)


def random_experts(name: str, experts: int, hidden: int, intermediate: int) -> list[Expert]:
    return [
        (
            stored(torch.randn(2 * intermediate, hidden) * hidden**-0.5, name),
            stored(torch.randn(hidden, intermediate) * intermediate**-0.5, name),
        )
        for _ in range(experts)
    ]


def bank_of(name: str, experts: Sequence[Expert], tiles: tuple[Tile, Tile] | None = None) -> TritonBank:
    hidden, intermediate = experts[0][1].shape
    bank = TritonBank(BankShape(len(experts), hidden, intermediate, FORMATS[name]), CPU, tiles)
    for position, expert in enumerate(experts):
        bank.store(position, *expert)
    return bank


def expected(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, experts: Sequence[Expert]) -> tuple[Tensor, Tensor]:
    """(result, sum of the magnitudes of its terms), float64 [T, H]: an error is seen against the latter."""
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    size_TH = torch.zeros_like(y_TH)
    for token, slots_K in enumerate(slots_TK.tolist()):
        for pick, slot in enumerate(slots_K):
            if 0 <= slot < len(experts):
                gate_up, down = (plain(weight) for weight in experts[slot])
                x_H, weight = x_TH[token].double(), weights_TK[token, pick].double()
                gate_I, up_I = (gate_up @ x_H).chunk(2)
                gate_size_I, up_size_I = (gate_up.abs() @ x_H.abs()).chunk(2)
                act_I = F.silu(gate_I) * up_I
                y_TH[token] += weight * (down @ act_I)
                size_TH[token] += weight.abs() * (down.abs() @ (act_I.abs() + gate_size_I * up_size_I))
    return y_TH, size_TH


def check(found: Tensor, exact: tuple[Tensor, Tensor], tolerance: float) -> None:
    """NaN fails too."""
    off = ((found.double() - exact[0]).abs() / (exact[1] + 1e-30)).flatten()
    assert bool((off <= tolerance).all()), f"off by {float(off.max()):.2g} of the magnitudes"
