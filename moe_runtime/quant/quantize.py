"""From plain weights to every format: the scale of each group by least squared error, then rounding to nearest.

Legend: N outputs, K inputs, R x C groups of S numbers; leading dimensions are kept.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.quant import fourbit
from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor, float_scales

_E4M3_MAX = 448.0
_E8M0_BIAS, _E2M1_EXPONENT = 127, 2
# Four-bit formats gain by clipping a group's largest number a little; the best of these shares is taken.
_CLIPS = tuple(1 - 0.04 * step for step in range(13))


def quantize(weight_NK: Tensor, form: Format) -> QuantizedTensor:
    """Quantize a weight [..., N, K]. Raises ValueError for a float format and for numbers that are not finite."""
    if not form.quantized:
        raise ValueError(f"{form.name} is not a quantized format")
    if not bool(torch.isfinite(weight_NK).all()):
        raise ValueError("the weight has numbers that are not finite")
    grouped = _Groups(weight_NK.float(), form)
    x_RCS = grouped.split()
    scales_RC1, zeros_RC1 = group_scales(x_RCS, form)
    return _pack(grouped, group_codes(x_RCS, scales_RC1, zeros_RC1, form), scales_RC1, zeros_RC1)


def group_scales(x_RCS: Tensor, form: Format) -> tuple[Tensor, Tensor | None]:
    """Scales [..., 1] of groups of numbers [..., S] in the format's dtype, and uint8 zero points where it has any."""
    if not form.zero_points:
        return _symmetric(x_RCS, form), None
    scales_RC1, zeros_RC1 = _asymmetric(x_RCS, form)
    return scales_RC1, zeros_RC1.to(torch.uint8)


def group_codes(x_RCS: Tensor, scales_RC1: Tensor, zeros_RC1: Tensor | None, form: Format) -> Tensor:
    """What is stored for numbers [..., S] of groups with these scales."""
    if zeros_RC1 is not None:
        return _asymmetric_codes(x_RCS, scales_RC1, zeros_RC1.float()).to(torch.uint8)
    return _codes(x_RCS / float_scales(scales_RC1), form)


class _Groups:
    """A weight cut into its scale groups and put together again; tails are filled up with zeros."""

    def __init__(self, weight_NK: Tensor, form: Format) -> None:
        self._weight_NK, self.form = weight_NK, form
        self._rows, self.columns = weight_NK.shape[-2:]
        self._height, self._width = form.group[0] or self._rows, form.group[1] or self.columns
        self._groups = form.groups(self._rows, self.columns)

    def split(self) -> Tensor:
        """[..., R, C, S]."""
        (r, c), h, w = self._groups, self._height, self._width
        padded = F.pad(self._weight_NK, (0, c * w - self.columns, 0, r * h - self._rows))
        return padded.unflatten(-1, (c, w)).unflatten(-3, (r, h)).transpose(-3, -2).flatten(-2)

    def join(self, x_RCS: Tensor) -> Tensor:
        """[..., N, K]."""
        h, w = self._height, self._width
        whole = x_RCS.unflatten(-1, (h, w)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
        return whole[..., : self._rows, : self.columns].contiguous()


def _pack(grouped: _Groups, codes_RCS: Tensor, scales_RC1: Tensor, zeros_RC1: Tensor | None) -> QuantizedTensor:
    values = grouped.join(codes_RCS)
    if grouped.form.packed == 2:
        values = fourbit.pack(values)
    zeros = None if zeros_RC1 is None else zeros_RC1.squeeze(-1)
    return QuantizedTensor(grouped.form, grouped.columns, values, scales_RC1.squeeze(-1), zeros)


def _symmetric(x_RCS: Tensor, form: Format) -> Tensor:
    """Scales [..., R, C, 1] in the format's dtype."""
    most_RC1 = x_RCS.abs().amax(-1, keepdim=True)
    if form.values == "e2m1":
        # The largest power of two at which the largest number still has its own exponent (OCP, section 6.3).
        exponent = torch.floor(torch.log2(most_RC1.clamp(min=2.0**-100))) - _E2M1_EXPONENT
        return (exponent + _E8M0_BIAS).clamp(0, 254).to(torch.uint8)
    top = {"int8": 127.0, "int4": 7.0, "e4m3": _E4M3_MAX}[form.values]
    if form.values != "int4":
        return _stored(most_RC1 / top, form)

    def error(scales_RC1: Tensor) -> Tensor:
        """In place, since this is what quantizing spends its time on."""
        scales_RC1 = scales_RC1.float()
        back_RCS = (x_RCS / scales_RC1).round_().clamp_(-8, 7).mul_(scales_RC1)
        return torch.linalg.vector_norm(back_RCS.sub_(x_RCS), dim=-1, keepdim=True)

    # A positive or a negative end may use code -8: the grid includes shares that let the largest number clip to 7.
    return _best([_stored(most_RC1 / top * clip, form) for clip in _CLIPS], error)


def _asymmetric(x_RCS: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Scales and zero points as floats [..., R, C, 1]; the range always holds 0, so that a zero weight stays zero."""
    low_RC1 = x_RCS.amin(-1, keepdim=True).clamp(max=0)
    range_RC1 = x_RCS.amax(-1, keepdim=True).clamp(min=0) - low_RC1
    # Clipping takes the same share of both ends, so the zero point stays where it is.
    zeros_RC1 = (-15 * low_RC1 / range_RC1.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(0, 15)

    def error(scales_RC1: Tensor) -> Tensor:
        back_RCS = _asymmetric_codes(x_RCS, scales_RC1, zeros_RC1).sub_(zeros_RC1).mul_(scales_RC1.float())
        return torch.linalg.vector_norm(back_RCS.sub_(x_RCS), dim=-1, keepdim=True)

    return _best([_stored(range_RC1 / 15 * clip, form) for clip in _CLIPS], error), zeros_RC1


def _asymmetric_codes(x_RCS: Tensor, scales_RC1: Tensor, zeros_RC1: Tensor) -> Tensor:
    return (x_RCS / scales_RC1.float()).round_().add_(zeros_RC1).clamp_(0, 15)


def _best(candidates: list[Tensor], error: Callable[[Tensor], Tensor]) -> Tensor:
    """Per group the candidate scale whose round trip has the least error, earlier ones first."""
    best, least = candidates[0], error(candidates[0])
    for scales in candidates[1:]:
        found = error(scales)
        best = torch.where(found < least, scales, best)
        least = torch.minimum(found, least)
    return best


def _stored(scales: Tensor, form: Format) -> Tensor:
    """In the dtype that is kept; 1 where that would be 0, since what is quantized is divided by it."""
    assert form.scales is not None
    kept = scales.clamp(max=torch.finfo(form.scales).max).to(form.scales)
    return torch.where(kept == 0, torch.ones_like(kept), kept)


def _codes(scaled_RCS: Tensor, form: Format) -> Tensor:
    match form.values:
        case "int8":
            return scaled_RCS.round().clamp(-127, 127).to(torch.int8)
        case "int4":
            return (scaled_RCS.round().clamp(-8, 7) + 8).to(torch.uint8)
        case "e4m3":
            return scaled_RCS.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        case _:
            return fourbit.e2m1_codes(scaled_RCS)
