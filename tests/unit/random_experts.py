"""Random experts in any format, and calls that visit them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.bank import BankShape, ExpertBank, Weight
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.quantize import quantize


def bank_shape(name: str, experts: int = 4, hidden: int = 100, intermediate: int = 72) -> BankShape:
    return BankShape(experts, hidden, intermediate, FORMATS[name])


def random_weight(shape: BankShape, rows: int, columns: int, generator: torch.Generator) -> Weight:
    plain_NK = torch.randn(rows, columns, generator=generator) * columns**-0.5
    return quantize(plain_NK, shape.format) if shape.format.quantized else plain_NK.to(shape.format.dtype)


def random_expert(shape: BankShape, seed: int) -> tuple[Weight, Weight]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = random_weight(shape, 2 * shape.intermediate, shape.hidden, generator)
    return gate_up, random_weight(shape, shape.hidden, shape.intermediate, generator)


def fill(*banks: ExpertBank) -> None:
    """The same experts in each, one a position."""
    for position in range(banks[0].shape.experts):
        expert = random_expert(banks[0].shape, position)
        for bank in banks:
            bank.store(position, *expert)


def parts(weight: Weight) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else list(weight.parts.values())


@dataclass(frozen=True)
class Call:
    x_TH: Tensor
    slots_TK: Tensor
    weights_TK: Tensor

    def of(self, bank: ExpertBank) -> Tensor:
        return bank(self.x_TH, self.slots_TK, self.weights_TK)

    def __getitem__(self, rows: slice) -> "Call":
        return Call(self.x_TH[rows], self.slots_TK[rows], self.weights_TK[rows])


def random_call(shape: BankShape, tokens: int, picks: int, seed: int, dtype: torch.dtype = torch.float32) -> Call:
    """Some picks are elsewhere, and a token may pick an expert twice."""
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, shape.hidden, generator=generator).to(dtype)
    slots_TK = torch.randint(-1, shape.experts, (tokens, picks), generator=generator)
    return Call(x_TH, slots_TK, torch.rand(tokens, picks, generator=generator))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
