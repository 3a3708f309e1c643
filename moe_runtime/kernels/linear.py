"""Linear layers whose weights a CPU reads in packed order (oneDNN's blocked layout), and plain ones elsewhere.

With few rows a linear layer is bound by reading its weights. The packed layout reads them once and in order: 1.5 to 3
times as fast as F.linear here (docs/performance.md), and a row's result is the same alone and in a batch, unlike
F.linear's.
Legend: T rows, N outputs, K inputs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.bank import Weight
from moe_runtime.quant.tensor import QuantizedTensor, dequantize

# What a back end makes of a weight: x to x @ weight.T.
Linear = Callable[[Tensor], Tensor]
LinearWeight = Weight | Linear
PACKED_DTYPES = (torch.float32, torch.bfloat16)
# oneDNN builds a kernel for each new number of rows (about a millisecond) and keeps 1024: pieces bound their number.
_PIECE_ROWS = 64
# Blocks are laid out for about this many rows; the layout for one row alone would not be batch-invariant.
_LAYOUT_ROWS = 32


def can_pack(weight_NK: Tensor) -> bool:
    """Whether this build, device and dtype have the packed form."""
    built = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return built and weight_NK.device.type == "cpu" and weight_NK.dtype in PACKED_DTYPES and not weight_NK.is_mkldnn


def pack(weight_NK: Tensor) -> Tensor:
    """The weight in the layout that `linear` is fastest with: packed where can_pack says so, else as it is.

    A packed tensor keeps its shape and dtype, and only `linear` and Tensor.to_dense take it.
    """
    if not can_pack(weight_NK):
        return weight_NK
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), _LAYOUT_ROWS)


def linear(x_TK: Tensor, weight_NK: LinearWeight, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, [T, N], for a packed, a plain or a quantized weight, or a back end's own form of one."""
    if not isinstance(weight_NK, Tensor | QuantizedTensor):
        y_TN = weight_NK(x_TK)
        return y_TN if bias_N is None else y_TN.add_(bias_N)
    if isinstance(weight_NK, QuantizedTensor):
        return F.linear(x_TK, dequantize(weight_NK, x_TK.dtype), bias_N)
    if not weight_NK.is_mkldnn:
        return F.linear(x_TK, weight_NK, bias_N)
    if len(x_TK) <= _PIECE_ROWS:
        return _packed_linear(x_TK, weight_NK, bias_N)
    return torch.cat([_packed_linear(piece, weight_NK, bias_N) for piece in x_TK.split(_PIECE_ROWS)])


def _packed_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TK, weight_NK, bias_N, "none", [], "")
