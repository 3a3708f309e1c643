"""MXFP4 as published: compressed-tensors' mxfp4-pack-quantized matrices, and gpt-oss's tensors of all experts.

Both hold what the canonical layout holds: two e2m1 codes in a byte, the even column in the low half, and an e8m0
exponent for 32 columns.
Legend: N outputs, K inputs, C groups of 32 columns, E experts, I intermediate.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.quant.checkpoints.fields import Fields
from moe_runtime.quant.checkpoints.scales import checked
from moe_runtime.quant.checkpoints.scheme import Part, PartError, Quantization, Rule, Scheme, left_plain
from moe_runtime.quant.formats import FORMATS, Format
from moe_runtime.quant.tensor import QuantizedTensor

_FORM = FORMATS["mxfp4"]
_GROUP_BYTES = 16


@dataclass(frozen=True)
class PackedE2m1(Scheme):
    """compressed-tensors: weight_packed uint8 [N, K / 2], weight_scale uint8 [N, C]."""

    layout: str = "mxfp4-pack-quantized"
    format: Format = _FORM
    scales: str = ".weight_scale"

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, Part]:
        rows, columns = shape
        return {
            ".weight_packed": Part(((rows, -(-columns // 2)),), ("U8",)),
            self.scales: Part((_FORM.groups(rows, columns),), ("U8",)),
        }

    def unpack(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedTensor:
        values = parts[".weight_packed"]
        if columns % 2 and bool((values[:, -1] >> 4).any()):
            raise PartError(".weight_packed", f"has bits beyond column {columns - 1}")
        return QuantizedTensor(_FORM, columns, values, checked(parts[self.scales], self.scales, _FORM))

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        """The tensors of a weight, by suffix."""
        return {".weight_packed": weight.values, self.scales: weight.scales_RC}


@dataclass(frozen=True)
class FusedBlocks(Scheme):
    """gpt-oss: *_blocks uint8 [E, N, C, 16], *_scales uint8 [E, N, C], a bias of its own beside them.

    Its gate and up rows alternate; `interleaved` says so of a tensor, and they are dealt out here.
    """

    layout: str = "mxfp4"
    format: Format = _FORM
    scales: str = "_scales"
    fused: bool = True
    interleaved: bool = False

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, Part]:
        experts, rows, columns = shape
        groups = -(-columns // 32)
        return {
            "_blocks": Part(((experts, rows, groups, _GROUP_BYTES), (experts, rows, groups * _GROUP_BYTES)), ("U8",)),
            self.scales: Part(((experts, rows, groups),), ("U8",)),
        }

    def unpack(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedTensor:
        values, scales = parts["_blocks"].reshape(rows, -1), checked(parts[self.scales], self.scales, _FORM)
        if bool(values[:, -(-columns // 2) :].any()):
            raise PartError("_blocks", f"has bits beyond column {columns - 1}")
        values = values[:, : -(-columns // 2)]
        if self.interleaved:
            values, scales = (torch.cat((part[0::2], part[1::2])) for part in (values, scales))
        return QuantizedTensor(_FORM, columns, values.contiguous(), scales)


def read_mxfp4(fields: Fields) -> Quantization:
    """quant_method mxfp4: the experts' two fused tensors, everything else plain."""
    plain = left_plain(fields.names("modules_to_not_convert"))
    fields.choose("dequantize", (False,), False)
    fields.finish()
    gate_up, down = FusedBlocks(interleaved=True), FusedBlocks()
    rules = (_ending(".gate_up_proj", gate_up), _ending(".down_proj", down))
    return Quantization("mxfp4", (plain, *rules), complete=False)


def _ending(suffix: str, scheme: Scheme) -> Rule:
    return Rule(lambda module: module.endswith(f".experts{suffix}"), scheme)
