"""A bank of experts on a GPU; see kernels/bank.py for the contract."""

from dataclasses import replace

import torch
from torch import Tensor

from moe_runtime.kernels.bank import BankShape, ExpertBank, Weight
from moe_runtime.kernels.triton.experts import run_experts
from moe_runtime.kernels.triton.launch import architecture
from moe_runtime.kernels.triton.tiles import Product, Tile, choose_tile
from moe_runtime.kernels.triton.weights import WeightStack


class TritonBank(ExpertBank):
    """Every format. tiles: the same two for any number of rows, instead of the table's and the rule's."""

    def __init__(self, shape: BankShape, device: torch.device, tiles: tuple[Tile, Tile] | None = None) -> None:
        self.shape = shape
        self._gate_up = WeightStack(shape.format, shape.experts, 2 * shape.intermediate, shape.hidden, device)
        self._down = WeightStack(shape.format, shape.experts, shape.hidden, shape.intermediate, device)
        self._tiles = tiles
        self._architecture = architecture(device)

    def store(self, position: int, gate_up_2IH: Weight, down_HI: Weight) -> None:
        for name, stack, weight in (("gate_up", self._gate_up, gate_up_2IH), ("down", self._down, down_HI)):
            try:
                stack.store(position, weight)
            except ValueError as error:
                raise ValueError(f"{name} of expert {position}: {error}") from None

    def fetch(self, position: int) -> tuple[Weight, Weight]:
        return self._gate_up.fetch(position), self._down.fetch(position)

    def __call__(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        tiles = self._tiles or self.choose_tiles(slots_TK.numel())
        return run_experts(x_TH, slots_TK, weights_TK, self._gate_up.operand, self._down.operand, tiles)

    def choose_tiles(self, picks: int) -> tuple[Tile, Tile]:
        """The tiles of both products for a number of picks; they share the first one's BLOCK_M."""
        shape = self.shape
        products = (
            Product(shape.format, "gate_up", shape.experts, shape.intermediate, shape.hidden),
            Product(shape.format, "down", shape.experts, shape.hidden, shape.intermediate),
        )
        first, second = (choose_tile(product, picks, self._architecture) for product in products)
        return first, replace(second, block_m=first.block_m)

    @property
    def stacks(self) -> tuple[WeightStack, WeightStack]:
        """gate_up and down, in place."""
        return self._gate_up, self._down

    @property
    def nbytes(self) -> int:
        return self._gate_up.nbytes + self._down.nbytes
