"""A quantized weight in the one canonical layout that quantizer, readers and kernels share, and the plain way back.

Legend: N outputs (rows), K inputs (columns), R x C groups; leading dimensions, such as experts, are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.quant import fourbit
from moe_runtime.quant.formats import FORMATS, Format

_E8M0_BIAS = 127


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight [..., N, K]. Row-major values [..., N, K], or [..., N, ceil(K/2)] bytes of fourbit codes.

    int8: two's complement. int4: codes 0..15, of which the zero point (8 where the format has none) is taken.
    scales_RC [..., R, C] in the format's dtype or a wider one; zeros_RC uint8 [..., R, C].
    Raises ValueError where shapes or dtypes do not fit.
    """

    format: Format
    columns: int
    values: Tensor
    scales_RC: Tensor
    zeros_RC: Tensor | None = None

    def __post_init__(self) -> None:
        rows, stored = self.values.shape[-2:]
        groups = self.format.groups(rows, self.columns)
        _expect("values dtype", self.values.dtype, self.format.dtype)
        _expect("stored columns", stored, -(-self.columns // self.format.packed))
        _expect("scales shape", tuple(self.scales_RC.shape), (*self.values.shape[:-2], *groups))
        _expect("zero points", self.zeros_RC is not None, self.format.zero_points)
        if self.zeros_RC is not None:
            _expect("zero points shape", self.zeros_RC.shape, self.scales_RC.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.columns)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """Everything that belongs to the weight, by name: what is saved, moved and checksummed."""
        zeros = {} if self.zeros_RC is None else {"zeros": self.zeros_RC}
        return {"values": self.values, "scales": self.scales_RC, **zeros}

    def __getitem__(self, index: int) -> "QuantizedTensor":
        """One weight of a stack."""
        zeros = None if self.zeros_RC is None else self.zeros_RC[index]
        return QuantizedTensor(self.format, self.columns, self.values[index], self.scales_RC[index], zeros)

    def to(self, device: torch.device) -> "QuantizedTensor":
        zeros = None if self.zeros_RC is None else self.zeros_RC.to(device)
        return QuantizedTensor(self.format, self.columns, self.values.to(device), self.scales_RC.to(device), zeros)


def dequantize(weight: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight as plain numbers [..., N, K], computed in float32 and rounded to dtype once."""
    numbers_NK = stored_numbers(weight)
    scales_NK = spread(float_scales(weight.scales_RC), weight)
    if weight.zeros_RC is not None:
        numbers_NK = numbers_NK - spread(weight.zeros_RC.float(), weight)
    return (numbers_NK * scales_NK).to(dtype)


def stored_numbers(weight: QuantizedTensor) -> Tensor:
    """What is stored, before scales and explicit zero points, float32 [..., N, K]."""
    if weight.format.packed == 1:
        return weight.values.float()
    codes_NK = fourbit.unpack(weight.values, weight.columns)
    if weight.format.values == "e2m1":
        return fourbit.e2m1_values(codes_NK.device)[codes_NK.int()]
    return codes_NK.float() if weight.format.zero_points else codes_NK.float() - 8


def float_scales(scales: Tensor) -> Tensor:
    """Scales as float32; e8m0 exponents become powers of two, and its code 255 NaN."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.where(scales == 255, float("nan"), torch.exp2(scales.float() - _E8M0_BIAS))


def spread(groups_RC: Tensor, weight: QuantizedTensor) -> Tensor:
    """One entry per group as one per number, [..., N, K]."""
    rows, columns = weight.shape[-2:]
    height, width = weight.format.group[0] or rows, weight.format.group[1] or columns
    tall = groups_RC.repeat_interleave(height, dim=-2)[..., :rows, :]
    return tall.repeat_interleave(width, dim=-1)[..., :columns]


def concat_rows(upper: QuantizedTensor, lower: QuantizedTensor) -> QuantizedTensor | None:
    """Both weights as one with upper's rows first; None where a group of rows would then straddle them."""
    height = upper.format.group[0]
    if height != 1 and (height == 0 or upper.shape[-2] % height):
        return None
    _expect("format of the lower rows", lower.format.name, upper.format.name)
    _expect("columns of the lower rows", lower.columns, upper.columns)
    joined = {name: torch.cat((part, lower.parts[name]), dim=-2) for name, part in upper.parts.items()}
    return QuantizedTensor(upper.format, upper.columns, joined["values"], joined["scales"], joined.get("zeros"))


def row_groups(weight: QuantizedTensor) -> QuantizedTensor:
    """An fp8-block weight with a scale of its own for each row of a block: the same numbers, joined with any rows."""
    rows = weight.shape[-2]
    scales_NC = weight.scales_RC.repeat_interleave(weight.format.group[0], dim=-2)[..., :rows, :].contiguous()
    return QuantizedTensor(FORMATS["fp8-g128"], weight.columns, weight.values, scales_NC)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{what}: found {found}, expected {expected}")
