"""Quantized weights joined by rows, and under another name for the same numbers."""

from collections.abc import Sequence
from dataclasses import replace

from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor, concat_rows, row_groups


def join_rows(weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """All rows in order, number for number; where blocks of rows would straddle two weights, in format fp8-g128."""
    joined = weights[0]
    for weight in weights[1:]:
        both = concat_rows(joined, weight)
        if both is None:
            return join_rows([row_groups(one) for one in weights])
        joined = both
    return joined


def as_format(weight: QuantizedTensor, form: Format) -> QuantizedTensor:
    """The same numbers in a format that differs in name, activations, or blocks of rows cut into rows.

    Raises ValueError for any other.
    """
    if (weight.format.name, form.name) == ("fp8-block", "fp8-g128"):
        return row_groups(weight)
    if replace(weight.format, name=form.name, activations=form.activations) != form:
        raise ValueError(f"a {weight.format.name} weight with {weight.format.scales} scales was asked for as {form}")
    return replace(weight, format=form)
