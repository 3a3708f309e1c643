"""Unquantized experts on the CPU: oneDNN's packed products (kernels/linear.py), whole experts side by side on threads.

Legend: T tokens, K picks, H hidden, I intermediate.
"""

import torch
from torch import Tensor

from moe_runtime.kernels import grouped_mlp
from moe_runtime.kernels.bank import BankShape, ExpertBank, Weight
from moe_runtime.kernels.linear import pack
from moe_runtime.kernels.workers import Workers


class OneDnnBank(ExpertBank):
    """Computes in the weights' dtype. Where linear.can_pack refuses them they stay plain, and lose batch invariance."""

    def __init__(self, shape: BankShape, workers: Workers) -> None:
        if shape.format.quantized:
            raise ValueError(f"{shape.format.name}: this bank takes unquantized weights")
        self.shape, self._workers = shape, workers
        nothing = torch.empty(0, dtype=shape.format.dtype)
        self._gate_up = [nothing] * shape.experts
        self._down = [nothing] * shape.experts

    def store(self, position: int, gate_up_2IH: Weight, down_HI: Weight) -> None:
        shape = self.shape
        assert 0 <= position < shape.experts
        self._gate_up[position] = _packed("gate_up", gate_up_2IH, shape, (2 * shape.intermediate, shape.hidden))
        self._down[position] = _packed("down", down_HI, shape, (shape.hidden, shape.intermediate))

    def fetch(self, position: int) -> tuple[Weight, Weight]:
        if not self._gate_up[position].numel():
            raise ValueError(f"position {position} holds no expert")
        return _plain(self._gate_up[position]), _plain(self._down[position])

    def __call__(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        dtype = self.shape.format.dtype
        y_TH = grouped_mlp.run(x_TH.to(dtype), slots_TK, weights_TK, self._gate_up, self._down, self._workers)
        return y_TH.to(x_TH.dtype)

    @property
    def nbytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in (*self._gate_up, *self._down))


def _packed(what: str, weight: Weight, shape: BankShape, expected: tuple[int, int]) -> Tensor:
    found = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else weight.format.name
    if not isinstance(weight, Tensor) or weight.dtype != shape.format.dtype or tuple(weight.shape) != expected:
        raise ValueError(f"{what}: found {found}, expected {shape.format.dtype} {list(expected)}")
    kept = pack(weight)
    return kept.clone() if kept is weight else kept


def _plain(weight: Tensor) -> Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight.clone()
