"""A linear layer of the attention half, or the LM head, on the CPU by the C++ kernels (native/linear.cpp).

Legend: T rows, N outputs, K inputs.
"""

from ctypes import byref

import torch
from torch import Tensor

from moe_runtime.kernels.bank import Weight
from moe_runtime.kernels.native import library as native
from moe_runtime.kernels.native import records


class NativeLinear:
    """x @ weight.T + bias for a weight of any format; a row's result does not depend on the other rows.

    threads: how many cores a call takes, None for as many as torch takes at that moment.
    Raises ValueError where the weight or the bias does not fit.
    """

    def __init__(
        self, weight_NK: Weight, bias_N: Tensor | None = None, threads: int | None = None, isa: int | None = None
    ) -> None:
        rows, columns = records.matrix_shape(weight_NK)
        if bias_N is not None and tuple(bias_N.shape) != (rows,):
            raise ValueError(f"the bias has shape {list(bias_N.shape)}, expected {[rows]}")
        self.format, self.shape, self.threads = records.format_of(weight_NK), (rows, columns), threads
        self._scales = records.scales_dtype(weight_NK)
        records.check("weight", weight_NK, self.format, self.shape, self._scales)
        self._isa = native.usual_isa() if isa is None else isa
        found = native.library()
        assert found is not None and self._isa >= 0, "ask native.usual_isa() first"
        self._multiply = found.moe_linear
        matrix = records.plan(self.format, rows, columns, self._scales, self._isa)
        self._memory = records.Memory(matrix.bytes)
        self._bias_N = None if bias_N is None else bias_N.float().contiguous()
        bias = None if self._bias_N is None else self._bias_N.data_ptr()
        self._linear = native.Linear(matrix, self._memory.address, bias)
        records.pack(matrix, self._memory.address, weight_NK)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """[..., K] float32, bfloat16 or float16 to [..., N] in the same dtype. Raises ValueError for anything else."""
        rows, columns = self.shape
        if not x_TK.dim() or x_TK.shape[-1] != columns or x_TK.dtype not in records.X_DTYPES:
            raise ValueError(f"x is {x_TK.dtype} {list(x_TK.shape)}: expected floats [..., {columns}]")
        if x_TK.device.type != "cpu":
            raise ValueError(f"x is on {x_TK.device}: expected the CPU")
        x_TK = x_TK.contiguous()
        y_TN = torch.empty(*x_TK.shape[:-1], rows, dtype=x_TK.dtype)
        call = native.LinearCall(
            x=x_TK.data_ptr(),
            y=y_TN.data_ptr(),
            tokens=x_TK.numel() // columns,
            x_type=records.NUMBERS[x_TK.dtype],
            threads=self.threads or torch.get_num_threads(),
            isa=self._isa,
        )
        if self._multiply(byref(self._linear), byref(call)) != native.OK:
            raise MemoryError("no memory for a linear layer's activations")
        return y_TN

    def weight(self) -> Weight:
        """A copy of the weight, bit for bit what was given."""
        return records.unpack(self._linear.matrix, self._memory.address, self.format, self._scales)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + (0 if self._bias_N is None else self._bias_N.nbytes)
