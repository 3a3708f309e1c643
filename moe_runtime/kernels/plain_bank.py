"""The reference of all expert banks: canonical weights, dequantized where they are used, in plain torch on any device.

Also what serves where no faster bank can. Legend: T tokens, K picks, H hidden, I intermediate, B rows of one expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.bank import BankShape, ExpertBank, Weight
from moe_runtime.quant.tensor import QuantizedTensor, dequantize


class PlainBank(ExpertBank):
    """Every product is computed in `dtype`, for the exact results of tests float32 or float64."""

    def __init__(self, shape: BankShape, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        self.shape = shape
        self._device, self._dtype = device or torch.device("cpu"), dtype
        self._experts: list[tuple[Weight, Weight] | None] = [None] * shape.experts

    def store(self, position: int, gate_up_2IH: Weight, down_HI: Weight) -> None:
        shape = self.shape
        _check("gate_up", gate_up_2IH, shape, (2 * shape.intermediate, shape.hidden))
        _check("down", down_HI, shape, (shape.hidden, shape.intermediate))
        self._experts[position] = (_copy(gate_up_2IH, self._device), _copy(down_HI, self._device))

    def fetch(self, position: int) -> tuple[Weight, Weight]:
        gate_up, down = self._expert(position)
        return _copy(gate_up, self._device), _copy(down, self._device)

    def _expert(self, position: int) -> tuple[Weight, Weight]:
        expert = self._experts[position]
        if expert is None:
            raise ValueError(f"position {position} holds no expert")
        return expert

    def __call__(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        dtype = self._dtype or torch.float32
        y_TH = torch.zeros(x_TH.shape, dtype=dtype, device=x_TH.device)
        for position in slots_TK.unique().tolist():
            if position < 0:
                continue
            token_B, pick_B = (slots_TK == position).nonzero(as_tuple=True)
            gate_up, down = self._expert(position)
            gate_BI, up_BI = self._product(x_TH[token_B].to(dtype), gate_up).chunk(2, dim=-1)
            out_BH = self._product(F.silu(gate_BI) * up_BI, down)
            y_TH.index_add_(0, token_B, out_BH * weights_TK[token_B, pick_B, None].to(dtype))
        return y_TH.to(x_TH.dtype)

    def _product(self, x_BK: Tensor, weight_NK: Weight) -> Tensor:
        if isinstance(weight_NK, Tensor):
            return x_BK @ weight_NK.T.to(x_BK.dtype)
        if self.shape.format.activations == "int8":
            x_BK = _as_int8(x_BK)
        return x_BK @ dequantize(weight_NK).T.to(x_BK.dtype)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for expert in self._experts if expert for weight in expert)


def _as_int8(x_BK: Tensor) -> Tensor:
    """What is left of each row after int8 with one symmetric scale."""
    scale_B1 = x_BK.float().abs().amax(-1, keepdim=True) / 127
    scale_B1 = torch.where(scale_B1 == 0, 1.0, scale_B1)
    return ((x_BK.float() / scale_B1).round() * scale_B1).to(x_BK.dtype)


def _check(what: str, weight: Weight, shape: BankShape, expected: tuple[int, int]) -> None:
    name = weight.format.name if isinstance(weight, QuantizedTensor) else str(weight.dtype).removeprefix("torch.")
    if (name, tuple(weight.shape)) != (shape.format.name, expected):
        raise ValueError(f"{what}: found {name} {list(weight.shape)}, expected {shape.format.name} {list(expected)}")


def _copy(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, Tensor):
        return weight.to(device, copy=True)
    zeros = None if weight.zeros_RC is None else weight.zeros_RC.to(device, copy=True)
    scales_RC = weight.scales_RC.to(device, copy=True)
    return QuantizedTensor(weight.format, weight.columns, weight.values.to(device, copy=True), scales_RC, zeros)
