"""AWQ checkpoints (AutoAWQ's gemm layout): outputs run along the rows, in an order of their own in each int32.

Legend: N outputs, K inputs, C groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_runtime.quant import fourbit
from moe_runtime.quant.checkpoints.fields import Fields
from moe_runtime.quant.checkpoints.scales import checked, int4_format, nibbles, regroup
from moe_runtime.quant.checkpoints.scheme import (
    SCALE_DTYPES,
    Part,
    Quantization,
    Scheme,
    everything,
    left_plain,
    widened,
)
from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor

# Where the outputs 0..7 of a word lie in it, lowest bits first.
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
_RUNNING = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend")


@dataclass(frozen=True)
class Awq(Scheme):
    """qweight int32 [K, N / 8], qzeros int32 [C, N / 8], scales [C, N]."""

    format: Format
    group: int | None
    layout: str = "awq"
    scales: str = ".scales"

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, Part]:
        rows, columns = shape
        groups = 1 if self.group is None else -(-columns // self.group)
        return {
            ".qweight": Part(((columns, -(-rows // 8)),), ("I32",)),
            ".qzeros": Part(((groups, -(-rows // 8)),), ("I32",)),
            ".scales": Part(((groups, rows),), tuple(SCALE_DTYPES)),
        }

    def unpack(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedTensor:
        codes_NK, zeros_NC = (_in_order(parts[name])[:, :rows].T for name in (".qweight", ".qzeros"))
        scales_NC = checked(regroup(parts[".scales"].T, self.group, self.format, columns), ".scales", self.format)
        return QuantizedTensor(
            widened(self.format, parts[".scales"].dtype),
            columns,
            fourbit.pack(codes_NK.contiguous()),
            scales_NC,
            regroup(zeros_NC, self.group, self.format, columns),
        )


def _in_order(words: Tensor) -> Tensor:
    return nibbles(words)[..., _ORDER].flatten(-2)


def read_awq(fields: Fields) -> Quantization:
    """quant_method awq."""
    fields.choose("bits", (4,))
    fields.choose("zero_point", (True,), True)
    fields.choose("version", ("gemm", "GEMM"), "gemm")
    fields.choose("format", ("gemm",), "gemm")
    size = fields.take("group_size", 128)
    form = int4_format(None if size == -1 else size, zero_points=True) if isinstance(size, int) and size else None
    if form is None:
        raise fields.refuse("group_size", size, "-1 or a multiple of 32")
    plain = left_plain(fields.names("modules_to_not_convert"))
    fields.ignore(_RUNNING)
    fields.finish()
    return Quantization("awq", (plain, everything(Awq(form, None if size == -1 else size))), complete=False)
