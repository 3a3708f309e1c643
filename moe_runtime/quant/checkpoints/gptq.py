"""GPTQ checkpoints (AutoGPTQ, GPTQModel): inputs run down the rows, and zero points were once stored less one.

Legend: N outputs, K inputs, C groups of inputs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.quant import fourbit
from moe_runtime.quant.checkpoints.fields import Fields
from moe_runtime.quant.checkpoints.scales import checked, int4_format, nibbles, regroup
from moe_runtime.quant.checkpoints.scheme import (
    SCALE_DTYPES,
    Part,
    PartError,
    Quantization,
    Rule,
    Scheme,
    everything,
    widened,
)
from moe_runtime.quant.formats import FORMATS, Format
from moe_runtime.quant.tensor import QuantizedTensor

_QWEIGHT, _QZEROS, _SCALES, _G_IDX = ".qweight", ".qzeros", ".scales", ".g_idx"
# How the weights were found, and by which program.
_PROVENANCE = (
    "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "model_name_or_path", "meta", "mse",
    "model_file_base_name", "model_seqlen", "block_name_to_quantize", "modules_in_block_to_quantize", "dataset",
    "module_name_preceding_first_block", "tokenizer", "use_cuda_fp16", "use_exllama", "disable_exllama", "backend",
    "exllama_config", "max_input_length", "cache_block_outputs", "batch_size", "pad_token_id", "act_group_aware",
    "quantizer", "version", "hyb_act", "lm_head", "offload_to_disk", "offload_to_disk_path",
)  # fmt: skip


@dataclass(frozen=True)
class Gptq(Scheme):
    """qweight int32 [K / 8, N], qzeros int32 [C, N / 8], scales [C, N], g_idx int32 [K]: each input's group.

    group: inputs that share a scale, None for all of them. zero_offset: what to add to a stored zero point, modulo
    its bits: 1 in the first version of the format. Where the format has no zero points, all of them are the middle.
    """

    format: Format
    group: int | None
    zero_offset: int
    layout: str = "gptq"
    scales: str = _SCALES

    @property
    def _bits(self) -> int:
        return 8 // self.format.packed

    @property
    def _per_word(self) -> int:
        return 32 // self._bits

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, Part]:
        rows, columns = shape
        groups = 1 if self.group is None else -(-columns // self.group)
        return {
            _QWEIGHT: Part(((-(-columns // self._per_word), rows),), ("I32",)),
            _QZEROS: Part(((groups, -(-rows // self._per_word)),), ("I32",)),
            _SCALES: Part(((groups, rows),), tuple(SCALE_DTYPES)),
            _G_IDX: Part(((columns,),), ("I32",), optional=True),
        }

    def unpack(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedTensor:
        self._check_order(parts.get(_G_IDX), columns)
        numbers_KN = self._numbers(parts[_QWEIGHT]).transpose(-2, -1).flatten(0, 1)
        codes_NK = numbers_KN[:columns].T.contiguous()
        scales_NC = checked(regroup(parts[_SCALES].T, self.group, self.format, columns), _SCALES, self.format)
        zeros_CN = self._numbers(parts[_QZEROS]).flatten(-2)[:, :rows]
        zeros_CN = (zeros_CN + self.zero_offset) & ((1 << self._bits) - 1)
        form = widened(self.format, parts[_SCALES].dtype)
        if form.zero_points:
            zeros_NC = regroup(zeros_CN.T, self.group, self.format, columns)
            return QuantizedTensor(form, columns, fourbit.pack(codes_NK), scales_NC, zeros_NC)
        self._check_middle(zeros_CN)
        values = fourbit.pack(codes_NK) if form.packed == 2 else (codes_NK ^ 128).view(torch.int8)
        return QuantizedTensor(form, columns, values, scales_NC)

    def _numbers(self, words: Tensor) -> Tensor:
        """The numbers of each word, lowest bits first, uint8 [..., 8 or 4]."""
        if self._bits == 4:
            return nibbles(words)
        return words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))

    def _check_order(self, g_idx_K: Tensor | None, columns: int) -> None:
        if g_idx_K is None:
            return
        in_order_K = torch.arange(columns) // (self.group or columns)
        if not torch.equal(g_idx_K.long(), in_order_K):
            raise PartError(_G_IDX, "says that groups are of inputs out of order (desc_act): supported is in order")

    def _check_middle(self, zeros_CN: Tensor) -> None:
        middle = 1 << (self._bits - 1)
        bad = zeros_CN != middle
        if bool(bad.any()):
            raise PartError(_QZEROS, f"has zero point {int(zeros_CN[bad][0])}: expected {middle}, since sym is true")


def read_gptq(fields: Fields) -> Quantization:
    """quant_method gptq. Which modules are stored plain, it does not always say."""
    bits, symmetric = fields.choose("bits", (4, 8)), fields.choose("sym", (True, False), True)
    size = fields.take("group_size", 128)
    group = None if size == -1 else size
    kind = fields.take("checkpoint_format", None) or fields.take("format", None) or "gptq"
    fields.choose("format", ("gptq", "gptq_v2"), "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise fields.refuse("checkpoint_format", kind, "'gptq', 'gptq_v2'")
    fields.choose("desc_act", (True, False), False)  # g_idx tells whether it changed anything
    fields.choose("pack_dtype", ("int32",), "int32")
    fields.choose("is_marlin_format", (False, None), False)
    fields.choose("adapter", (None,), None)
    fields.choose("rotation", (None,), None)
    fields.choose("method", ("gptq",), "gptq")
    plain = _skipped(fields)
    fields.ignore(_PROVENANCE)
    fields.finish()
    scheme = Gptq(_format(fields, bits, group, symmetric), group, zero_offset=0 if kind == "gptq_v2" else 1)
    return Quantization("gptq", (plain, everything(scheme)), complete=False)


def _format(fields: Fields, bits: int, group: object, symmetric: bool) -> Format:
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group < 1):
        raise fields.refuse("group_size", group, "-1 or a positive number")
    if bits == 8:
        if group is not None or not symmetric:
            raise fields.refuse("bits", 8, "4, or 8 with group_size -1 and sym true")
        return FORMATS["w8a16"]
    form = int4_format(group, zero_points=not symmetric)
    if form is None:
        raise fields.refuse("group_size", group, "-1 or a multiple of 32")
    return form


def _skipped(fields: Fields) -> Rule:
    """GPTQModel's `dynamic`, by regular expression: modules to skip (-:), or to quantize otherwise (refused)."""
    tree = fields.take("dynamic", None) or {}
    for pattern, override in tree.items():
        if override or not pattern.startswith("-:"):
            raise fields.refuse("dynamic", tree, "patterns of modules to skip (-:), without settings of their own")
    patterns = [re.compile(pattern.removeprefix("-:")) for pattern in tree]
    return Rule(lambda module: any(pattern.match(module) for pattern in patterns), None)
