"""int8 and e4m3 numbers stored as they are, with their scales in a tensor beside them.

compressed-tensors' int-quantized, naive-quantized and float-quantized layouts, and quant_method fp8 (DeepSeek's blocks
of 128 x 128, whose weight_scale_inv is what to multiply with, and AutoFP8's one scale per tensor).
Legend: N outputs, K inputs, R x C groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.quant.checkpoints.scales import checked, regroup
from moe_runtime.quant.checkpoints.scheme import SCALE_DTYPES, Part, PartError, Scheme
from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor

_WEIGHT = ".weight"
_DTYPES = {"int8": "I8", "e4m3": "F8_E4M3"}
_E4M3_NAN = 0x7F


@dataclass(frozen=True)
class PlainNumbers(Scheme):
    """group: columns that share a scale as stored where they are grouped; per_tensor: one scale for everything."""

    layout: str
    format: Format
    group: int | None = None
    per_tensor: bool = False
    scales: str = ".weight_scale"

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, Part]:
        rows, columns = shape
        return {
            _WEIGHT: Part(((rows, columns),), (_DTYPES[self.format.values],)),
            self.scales: Part(self._scale_shapes(rows, columns), tuple(SCALE_DTYPES)),
        }

    def _scale_shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        if self.per_tensor:
            return (1,), (1, 1), ()
        if self.group is not None:
            return ((rows, -(-columns // self.group)),)
        groups = self.format.groups(rows, columns)
        return (groups,) if self.format.group != (1, 0) else (groups, (rows,))

    def unpack(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedTensor:
        values, scales = parts[_WEIGHT], checked(parts[self.scales], self.scales, self.format)
        if self.format.values == "e4m3" and bool(((values.view(torch.uint8) & _E4M3_NAN) == _E4M3_NAN).any()):
            raise PartError(_WEIGHT, "has numbers that are not finite")
        groups_R, groups_C = self.format.groups(rows, columns)
        if self.group is not None:
            scales_RC = regroup(scales, self.group, self.format, columns)
        elif self.per_tensor:
            scales_RC = scales.reshape(1, 1).expand(groups_R, groups_C).contiguous()
        else:
            scales_RC = scales.reshape(groups_R, groups_C)
        return QuantizedTensor(self.format, columns, values, scales_RC)

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        """The tensors of a weight in the canonical groups, by suffix."""
        return {_WEIGHT: weight.values, self.scales: weight.scales_RC}
