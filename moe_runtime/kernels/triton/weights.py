"""Weights as the kernels read them: the canonical layout stacked on the device, each row filled up to 16 bytes.

Legend: E experts, N rows (outputs), K columns (inputs), U units of a row (see decode.py), R x C scale groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.bank import Weight
from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor

_ALIGNMENT = 16


@dataclass(frozen=True)
class Operand:
    """What a kernel is given: units_ENU in the unit's dtype; the units again where there are no scales or zeros."""

    format: Format
    rows: int
    columns: int
    units_ENU: Tensor
    scales_ERC: Tensor
    zeros_ERC: Tensor


class WeightStack:
    """Same-sized weights of one format; written and read one at a time, bit for bit."""

    def __init__(self, form: Format, experts: int, rows: int, columns: int, device: torch.device) -> None:
        self.format, self.rows, self.columns = form, rows, columns
        stored = -(-columns // form.packed)
        width = -(-stored * form.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // form.dtype.itemsize
        self._values_ENS = torch.zeros(experts, rows, width, dtype=form.dtype, device=device)
        self._stored = stored
        groups = (experts, *form.groups(rows, columns))
        self._scales = None if form.scales is None else torch.zeros(groups, dtype=form.scales, device=device)
        self._zeros = torch.zeros(groups, dtype=torch.uint8, device=device) if form.zero_points else None
        # A checkpoint's scales may be wider than the format's; what was stored comes back in its own dtype.
        self._scale_dtypes = [form.scales] * experts

    def store(self, position: int, weight: Weight) -> None:
        """Raises ValueError where shape or format do not fit."""
        self._check(weight)
        if isinstance(weight, Tensor):
            self._values_ENS[position, :, : self._stored] = weight
            return
        assert self._scales is not None
        self._values_ENS[position, :, : self._stored] = weight.values
        if weight.scales_RC.dtype.itemsize > self._scales.dtype.itemsize:
            self._scales = self._scales.to(weight.scales_RC.dtype)
        self._scales[position] = weight.scales_RC.to(self._scales.dtype)
        self._scale_dtypes[position] = weight.scales_RC.dtype
        if self._zeros is not None:
            self._zeros[position] = weight.parts["zeros"]

    def fetch(self, position: int) -> Weight:
        values = self._values_ENS[position, :, : self._stored].clone()
        if self._scales is None:
            return values
        scales = self._scales[position].to(self._scale_dtypes[position], copy=True)
        zeros = None if self._zeros is None else self._zeros[position].clone()
        return QuantizedTensor(self.format, self.columns, values, scales, zeros)

    @property
    def operand(self) -> Operand:
        units = self._values_ENS
        if self.format.values in ("int8", "e4m3") and self.format.activations == "float":
            units = units.view(torch.int16)
        scales = units if self._scales is None else self._scales
        zeros = units if self._zeros is None else self._zeros
        return Operand(self.format, self.rows, self.columns, units, scales, zeros)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._values_ENS, self._scales, self._zeros) if part is not None)

    def _check(self, weight: Weight) -> None:
        found = weight.dtype if isinstance(weight, Tensor) else weight.format.name
        expected = self.format.name if self.format.quantized else self.format.dtype
        if found != expected:
            raise ValueError(f"the weight's format is {found}, expected {expected}")
        if tuple(weight.shape) != (self.rows, self.columns):
            raise ValueError(f"the weight has shape {list(weight.shape)}, expected {[self.rows, self.columns]}")
