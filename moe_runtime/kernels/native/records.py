"""Weights in and out of the layout that the C++ kernels stream (native/layout.cpp), and the memory they lie in.

Legend: N outputs, K inputs, R x C groups.
"""

from ctypes import byref

import torch
from torch import Tensor

from moe_runtime.kernels.bank import Weight
from moe_runtime.kernels.native import library as native
from moe_runtime.quant.formats import FORMATS, Format
from moe_runtime.quant.tensor import QuantizedTensor

X_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of activations
_VALUES = {
    "w8a16": 0, "w8a8": 1, "int4": 2, "e2m1": 3, "e4m3": 4, "bfloat16": 5, "float16": 6, "float32": 7,
}  # fmt: skip
NUMBERS: dict[torch.dtype | None, int] = {
    None: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 4,
}  # fmt: skip
_HUGE_PAGE = 2 << 20


def plan(
    form: Format, rows: int, columns: int, scales: torch.dtype | None, isa: int, gated: bool = False
) -> native.Matrix:
    """Where everything of a weight [rows, columns] lies; gated: [2 * rows, columns], gate's rows first."""
    found = native.library()
    assert found is not None
    matrix = native.Matrix(
        values=_VALUES[form.name if form.values in ("int8", "float") else form.values],
        scales=NUMBERS[scales],
        rows=rows,
        columns=columns,
        group_rows=form.group[0],
        group=form.group[1],
        zero_points=form.zero_points,
        gated=gated,
    )
    if found.moe_plan(byref(matrix), isa):
        raise ValueError(f"{form.name}: a weight of {rows} x {columns} is beyond the native kernels")
    return matrix


def format_of(weight: Weight) -> Format:
    """Raises ValueError for a plain tensor of a dtype that no format has."""
    if isinstance(weight, QuantizedTensor):
        return weight.format
    name = str(weight.dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise ValueError(f"a weight is {name}: expected float32, bfloat16 or float16")
    return FORMATS[name]


def matrix_shape(weight: Weight) -> tuple[int, int]:
    """[N, K]. Raises ValueError for a stack of weights."""
    if len(weight.shape) != 2:
        raise ValueError(f"a weight has shape {list(weight.shape)}: expected [outputs, inputs]")
    return weight.shape[0], weight.shape[1]


def scales_dtype(weight: Weight) -> torch.dtype | None:
    """None for plain weights. Raises ValueError for a dtype that scales cannot have."""
    if not isinstance(weight, QuantizedTensor):
        return None
    dtype = weight.scales_RC.dtype
    if dtype not in NUMBERS or (dtype == torch.uint8) != (weight.format.scales == torch.uint8):
        raise ValueError(f"the scales of {weight.format.name} are {dtype}: expected {weight.format.scales} or wider")
    return dtype


def check(what: str, weight: Weight, form: Format, shape: tuple[int, int], scales: torch.dtype | None) -> None:
    """Raise ValueError unless the weight has this format, shape and dtype of scales, is on the CPU, and all numbers."""
    found = (format_of(weight).name, tuple(weight.shape), scales_dtype(weight))
    if found != (form.name, shape, scales):
        raise ValueError(f"{what}: found {_text(*found)}, expected {_text(form.name, shape, scales)}")
    if any(part.device.type != "cpu" for part in _parts(weight)):
        raise ValueError(f"{what} is not on the CPU")
    if isinstance(weight, QuantizedTensor):
        bad = weight.values.view(torch.uint8) & 127 == 127 if form.values == "e4m3" else weight.scales_RC == 255
        if form.values in ("e4m3", "e2m1") and bool(bad.any()):
            raise ValueError(f"{what}: the weight has numbers that are not finite")


def _text(name: str, shape: tuple[int, ...], scales: torch.dtype | None) -> str:
    return f"{name} {list(shape)}{f' with {scales} scales' if scales else ''}"


def pack(matrix: native.Matrix, record: int, weight: Weight) -> None:
    """Write a weight that passed `check` to a record's address."""
    found = native.library()
    assert found is not None
    parts = [part.contiguous() for part in _parts(weight)]
    found.moe_pack(byref(matrix), record, *_addresses(parts))


def unpack(matrix: native.Matrix, record: int, form: Format, scales: torch.dtype | None) -> Weight:
    """A copy of the weight in a record, as it was packed."""
    found = native.library()
    assert found is not None
    rows, columns = matrix.rows * (1 + matrix.gated), matrix.columns
    values = torch.empty(rows, -(-columns // form.packed), dtype=form.dtype)
    weight: Weight = values
    if scales is not None:
        groups = form.groups(rows, columns)
        zeros = torch.empty(groups, dtype=torch.uint8) if form.zero_points else None
        weight = QuantizedTensor(form, columns, values, torch.empty(groups, dtype=scales), zeros)
    found.moe_unpack(byref(matrix), record, *_addresses(_parts(weight)))
    return weight


def _parts(weight: Weight) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else list(weight.parts.values())


def _addresses(parts: list[Tensor]) -> list[int | None]:
    return [part.data_ptr() for part in parts] + [None] * (3 - len(parts))


class Memory:
    """Bytes that start on a cache line, or where there are enough of them on a huge page."""

    def __init__(self, nbytes: int) -> None:
        found = native.library()
        assert found is not None
        huge = nbytes >= _HUGE_PAGE
        align = _HUGE_PAGE if huge else 64
        self.nbytes = nbytes
        # What lies before the first boundary is never touched, so it takes no memory.
        self._storage = torch.empty(nbytes + align, dtype=torch.uint8)
        self.address = -(-self._storage.data_ptr() // align) * align
        if huge:
            found.moe_huge_pages(self.address, nbytes // _HUGE_PAGE * _HUGE_PAGE)
