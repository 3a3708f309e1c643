"""What the layouts share: checking scales, groups larger than the canonical ones, and four-bit numbers in int32 words.

Legend: N outputs, K inputs, R x C groups, W int32 words.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.quant import fourbit
from moe_runtime.quant.checkpoints.scheme import PartError, widened
from moe_runtime.quant.formats import FORMATS, Format

_INT4_GROUPS = (128, 64, 32)
_E8M0_NAN = 255


def checked(scales: Tensor, suffix: str, form: Format) -> Tensor:
    """Scales in the dtype that the (widened) format has. Raises PartError for one that is not finite and above 0."""
    bad = scales == _E8M0_NAN if scales.dtype == torch.uint8 else ~(torch.isfinite(scales) & (scales > 0))
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        number = "255 (not a number)" if scales.dtype == torch.uint8 else float(scales[bad][0])
        raise PartError(suffix, f"scale {place} is {number}: expected a finite number above 0")
    wide = widened(form, scales.dtype).scales
    assert wide is not None
    return scales.to(wide)


def int4_format(group: int | None, zero_points: bool) -> Format | None:
    """The four-bit format that holds groups of this many columns exactly (None: whole rows), or None.

    A larger group becomes several with the same scale.
    """
    for size in _INT4_GROUPS:
        if group is None or group % size == 0:
            return FORMATS[f"w4a16-g{size}{'-zp' if zero_points else ''}"]
    return None


def regroup(stored_NG: Tensor, stored_group: int | None, form: Format, columns: int) -> Tensor:
    """One entry for each of the stored groups of columns (None: one for all) as one for each of the format's."""
    groups = form.groups(1, columns)[1]
    times = groups if stored_group is None else stored_group // form.group[1]
    return stored_NG.repeat_interleave(times, dim=-1)[..., :groups].contiguous()


def nibbles(words: Tensor) -> Tensor:
    """The eight four-bit numbers of each int32, lowest bits first, uint8 [..., W, 8]."""
    return fourbit.unpack(_dense(words).view(torch.uint8), words.shape[-1] * 8).unflatten(-1, (-1, 8))


def words(bytes_B: Tensor) -> Tensor:
    """Bytes as int32 words [..., ceil(B / 4)], the last one filled up with zeros."""
    return _dense(F.pad(bytes_B, (0, -bytes_B.shape[-1] % 4))).view(torch.int32)


def _dense(x: Tensor) -> Tensor:
    """A copy that can be viewed as another dtype: `contiguous` leaves dimensions of size 1 with any stride."""
    return x.clone(memory_format=torch.contiguous_format)
