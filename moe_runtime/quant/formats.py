"""The weight formats: what a number is, which numbers share a scale, and what happens to activations.

One description serves the quantizer, the readers of published checkpoints, the kernels and live moves of experts.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

import torch

from moe_runtime.errors import ConfigError

Values = Literal["float", "int8", "int4", "e4m3", "e2m1"]


@dataclass(frozen=True)
class Format:
    """How a weight [N outputs, K inputs] is stored.

    group: (rows, columns) that share a scale, 0 meaning the whole extent; the last group of a row may be shorter.
    scales: their dtype; uint8 holds e8m0 exponents (OCP Microscaling, bias 127). zero_points: one for each scale.
    activations: `int8` where the kernel quantizes each token's input to int8 (symmetric, one scale a token).
    """

    name: str
    values: Values
    dtype: torch.dtype  # of the stored values; two four-bit numbers share a uint8
    group: tuple[int, int] = (1, 0)
    scales: torch.dtype | None = None
    zero_points: bool = False
    activations: Literal["float", "int8"] = "float"

    @property
    def quantized(self) -> bool:
        return self.values != "float"

    @property
    def packed(self) -> int:
        """Numbers in each stored element."""
        return 2 if self.values in ("int4", "e2m1") else 1

    def groups(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, columns] weight."""
        return -(-rows // (self.group[0] or rows)), -(-columns // (self.group[1] or columns))

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a [rows, columns] weight with its scales and zero points."""
        values = rows * -(-columns // self.packed) * self.dtype.itemsize
        if self.scales is None:
            return values
        groups_R, groups_C = self.groups(rows, columns)
        return values + groups_R * groups_C * (self.scales.itemsize + self.zero_points)


def _int4(group: int, zero_points: bool) -> Format:
    name = f"w4a16-g{group}{'-zp' if zero_points else ''}"
    return Format(name, "int4", torch.uint8, (1, group), torch.float16, zero_points)


_ALL = (
    Format("float32", "float", torch.float32),
    Format("bfloat16", "float", torch.bfloat16),
    Format("float16", "float", torch.float16),
    Format("w8a16", "int8", torch.int8, (1, 0), torch.float32),
    Format("w8a8", "int8", torch.int8, (1, 0), torch.float32, activations="int8"),
    *(_int4(group, zero_points) for group in (32, 64, 128) for zero_points in (False, True)),
    Format("fp8", "e4m3", torch.float8_e4m3fn, (1, 0), torch.float32),
    Format("fp8-g128", "e4m3", torch.float8_e4m3fn, (1, 128), torch.float32),
    Format("fp8-block", "e4m3", torch.float8_e4m3fn, (128, 128), torch.float32),
    Format("mxfp4", "e2m1", torch.uint8, (1, 32), torch.uint8),
)
FORMATS = {one.name: one for one in _ALL}
QUANTIZED = tuple(one.name for one in _ALL if one.quantized)


def plain_format(dtype: torch.dtype) -> Format:
    """The format of weights that are kept as plain numbers of this dtype."""
    return next(one for one in _ALL if not one.quantized and one.dtype == dtype)


def format_named(name: str, place: str) -> Format:
    """The format of this name; ConfigError names `place` (a key or an option) and the known formats otherwise."""
    if name in FORMATS:
        return FORMATS[name]
    near = difflib.get_close_matches(name, FORMATS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{place} is {name!r}: expected one of {', '.join(FORMATS)}{hint}")
