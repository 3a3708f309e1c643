"""compressed-tensors' pack-quantized layout: integers of four or eight bits, offset to be positive, in int32 words.

Legend: N outputs, K inputs, C groups of a row, W int32 words of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.quant import fourbit
from moe_runtime.quant.checkpoints.scales import checked, nibbles, regroup, words
from moe_runtime.quant.checkpoints.scheme import SCALE_DTYPES, Part, PartError, Scheme, widened
from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor

_PACKED, _SHAPE, _SCALE, _ZERO = ".weight_packed", ".weight_shape", ".weight_scale", ".weight_zero_point"
_INT8_OFFSET = 128


@dataclass(frozen=True)
class PackedInts(Scheme):
    """group: columns that share a scale as stored, None for whole rows; scales may also be one for all rows.

    weight_packed int32 [N, W], weight_shape int64 [2], weight_scale [N, C], weight_zero_point int32 [N / 8, C].
    """

    format: Format
    group: int | None
    layout: str = "pack-quantized"
    scales: str = _SCALE

    @property
    def _bits(self) -> int:
        return 8 // self.format.packed

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, Part]:
        rows, columns = shape
        groups = 1 if self.group is None else -(-columns // self.group)
        whole = ((rows,), (1,), (1, 1), ()) if self.group is None else ()
        parts = {
            _PACKED: Part(((rows, -(-columns * self._bits // 32)),), ("I32",)),
            _SHAPE: Part(((2,),), ("I64", "I32")),
            _SCALE: Part(((rows, groups), *whole), tuple(SCALE_DTYPES)),
        }
        if self.format.zero_points:
            parts[_ZERO] = Part(((-(-rows // 8), groups),), ("I32",))
        return parts

    def unpack(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedTensor:
        if parts[_SHAPE].tolist() != [rows, columns]:
            raise PartError(_SHAPE, f"holds {parts[_SHAPE].tolist()}: expected {[rows, columns]}")
        stored_NC = parts[_SCALE].reshape(-1, 1 if self.group is None else parts[_SCALE].shape[-1])
        scales_NC = regroup(stored_NC.expand(rows, -1), self.group, self.format, columns)
        scales_NC = checked(scales_NC, _SCALE, self.format)
        form = widened(self.format, parts[_SCALE].dtype)
        zeros_NC = self._zeros(parts[_ZERO], rows, columns) if form.zero_points else None
        return QuantizedTensor(form, columns, self._values(parts[_PACKED], columns), scales_NC, zeros_NC)

    def _values(self, packed_NW: Tensor, columns: int) -> Tensor:
        bytes_NB = packed_NW.contiguous().view(torch.uint8)
        used = -(-columns * self._bits // 8)
        half_empty = columns % self.format.packed
        if bool(bytes_NB[:, used:].any()) or (half_empty and bool((bytes_NB[:, used - 1] >> 4).any())):
            raise PartError(_PACKED, f"has bits beyond column {columns - 1}")
        if self._bits == 8:
            return (bytes_NB[:, :used] ^ _INT8_OFFSET).view(torch.int8)
        return bytes_NB[:, :used].contiguous()

    def _zeros(self, packed_VC: Tensor, rows: int, columns: int) -> Tensor:
        """uint8 [N, C] from words that run down the rows."""
        zeros_CN = nibbles(packed_VC.T).flatten(-2)
        if bool(zeros_CN[:, rows:].any()):
            raise PartError(_ZERO, f"has bits beyond row {rows - 1}")
        return regroup(zeros_CN[:, :rows].T, self.group, self.format, columns)

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        """The tensors of a weight in the canonical groups, by suffix."""
        values = weight.values.view(torch.uint8)
        parts = {
            _PACKED: words(values ^ _INT8_OFFSET if self._bits == 8 else values),
            _SHAPE: torch.tensor(weight.shape),
            _SCALE: weight.scales_RC,
        }
        if weight.zeros_RC is not None:
            parts[_ZERO] = words(fourbit.pack(weight.zeros_RC.T)).T.contiguous()
        return parts
