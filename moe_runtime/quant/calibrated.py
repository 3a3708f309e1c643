"""Quantizing column by column, each column's rounding error carried on to those that are still to come.

GPTQ (Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, 2022): where inputs are correlated, later columns can make up for
what earlier ones got wrong, so that the error of the products, not that of the weights, becomes small. Columns go in
their stored order and groups keep their place, so what comes out is a weight like any other of its format.

Legend: T tokens, N outputs, K inputs, S columns of a group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_runtime.quant import fourbit
from moe_runtime.quant.formats import Format
from moe_runtime.quant.quantize import group_codes, group_scales
from moe_runtime.quant.tensor import QuantizedTensor, float_scales

# What is added to the inputs' second moments, as a share of their mean: inputs that the text did not show.
_DAMPING = 0.1


def can_calibrate(form: Format) -> bool:
    """Whether a format gains by it: those of four bits, in groups within a row."""
    return form.packed == 2 and form.group[0] == 1


def error_factor(inputs_TK: Tensor) -> Tensor:
    """How an error at one column is made up for by later ones, from some inputs of the weight: float32 [K, K].

    It is the upper Cholesky factor of the inverse of their damped second moments.
    """
    inputs_TK = inputs_TK.float()
    moments_KK = inputs_TK.T @ inputs_TK
    diagonal_K = moments_KK.diagonal()
    diagonal_K += _DAMPING * diagonal_K.mean() + torch.finfo(torch.float32).tiny
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(moments_KK))
    return torch.linalg.cholesky(inverse_KK, upper=True)


def quantize_calibrated(weight_NK: Tensor, factor_KK: Tensor, form: Format) -> QuantizedTensor:
    """The weight in a format that can_calibrate; factor_KK: see error_factor. Raises ValueError as quantize does."""
    assert can_calibrate(form)
    if not bool(torch.isfinite(weight_NK).all()):
        raise ValueError("the weight has numbers that are not finite")
    left_NK, codes, scales, zeros = weight_NK.float().clone(), [], [], []
    for columns in _groups(weight_NK.shape[1], form.group[1]):
        group = _Group(left_NK[:, columns], form)
        errors_NS = group.quantize(factor_KK[columns, columns])
        left_NK[:, columns.stop :] -= errors_NS @ factor_KK[columns, columns.stop :]
        codes.append(group.codes_NS)
        scales.append(group.scales_N1)
        zeros.append(group.zeros_N1)
    return QuantizedTensor(
        form,
        weight_NK.shape[1],
        fourbit.pack(torch.cat(codes, dim=1)),
        torch.cat(scales, dim=1),
        torch.cat([one for one in zeros if one is not None], dim=1) if form.zero_points else None,
    )


def _groups(columns: int, size: int) -> Iterator[slice]:
    for start in range(0, columns, size):
        yield slice(start, min(start + size, columns))


class _Group:
    """Columns that share a scale in each row; the scale is chosen before the first of them is rounded."""

    def __init__(self, left_NS: Tensor, form: Format) -> None:
        self._left_NS, self._form = left_NS.clone(), form
        scales_NC1, zeros_NC1 = group_scales(self._left_NS[:, None], form)
        self.scales_N1 = scales_NC1[:, 0]
        self.zeros_N1 = None if zeros_NC1 is None else zeros_NC1[:, 0]
        self.codes_NS = torch.empty(left_NS.shape, dtype=torch.uint8)

    def quantize(self, factor_SS: Tensor) -> Tensor:
        """Round column after column; the errors [N, S] in terms of the factor's rows."""
        errors_NS = torch.empty_like(self._left_NS)
        for column in range(errors_NS.shape[1]):
            exact_N1 = self._left_NS[:, column : column + 1]
            codes_N1 = group_codes(exact_N1, self.scales_N1, self.zeros_N1, self._form)
            error_N1 = (exact_N1 - self._numbers(codes_N1)) / factor_SS[column, column]
            self._left_NS[:, column + 1 :] -= error_N1 * factor_SS[column, column + 1 :]
            self.codes_NS[:, column : column + 1] = codes_N1
            errors_NS[:, column : column + 1] = error_N1
        return errors_NS

    def _numbers(self, codes_N1: Tensor) -> Tensor:
        if self._form.values == "e2m1":
            return fourbit.e2m1_values()[codes_N1.int()] * float_scales(self.scales_N1)
        middle = 8 if self.zeros_N1 is None else self.zeros_N1.float()
        return (codes_N1.float() - middle) * self.scales_N1.float()
