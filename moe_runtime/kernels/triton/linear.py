"""A quantized linear layer on a GPU: the grouped product with one group.

Legend: T rows, N outputs, K inputs.
"""

import torch
from torch import Tensor

from moe_runtime.kernels.bank import Weight
from moe_runtime.kernels.triton.experts import left_side, multiply, result_dtype
from moe_runtime.kernels.triton.launch import architecture
from moe_runtime.kernels.triton.tiles import Product, Tile, choose_tile
from moe_runtime.kernels.triton.weights import WeightStack
from moe_runtime.quant.formats import FORMATS, Format


class TritonLinear:
    """x @ weight.T + bias, of every format. tile: the same for any number of rows, instead of the table's or rule's."""

    def __init__(self, weight_NK: Weight, bias_N: Tensor | None = None, tile: Tile | None = None) -> None:
        form, device = _format(weight_NK), _device(weight_NK)
        rows, columns = weight_NK.shape
        if bias_N is not None and tuple(bias_N.shape) != (rows,):
            raise ValueError(f"the bias has shape {list(bias_N.shape)}, expected {[rows]}")
        self._stack, self._bias_N, self._tile = WeightStack(form, 1, rows, columns, device), bias_N, tile
        self._stack.store(0, weight_NK)
        self._product, self._architecture = Product(form, "linear", 1, rows, columns), architecture(device)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """[..., K] to [..., N] in x's dtype; a row's result does not depend on the other rows."""
        x, weights = x_TK.reshape(-1, x_TK.shape[-1]).contiguous(), self._stack.operand
        assert x.shape[1] == weights.columns
        tile = self._tile or choose_tile(self._product, len(x), self._architecture)
        out = x.new_empty(len(x), weights.rows, dtype=result_dtype(x, weights))
        multiply(out, left_side(x, weights), weights, tile, bias_N=self._bias_N)()
        return out.to(x_TK.dtype).view(*x_TK.shape[:-1], weights.rows)

    @property
    def nbytes(self) -> int:
        return self._stack.nbytes + (0 if self._bias_N is None else self._bias_N.nbytes)


def _device(weight: Weight) -> torch.device:
    return weight.device if isinstance(weight, Tensor) else weight.values.device


def _format(weight: Weight) -> Format:
    if not isinstance(weight, Tensor):
        return weight.format
    return FORMATS[str(weight.dtype).removeprefix("torch.")]
