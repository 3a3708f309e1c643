"""Two four-bit numbers in a byte, the even column in the low half; and the sixteen numbers that e2m1 has.

Legend: K columns, B bytes; leading dimensions are kept.
"""

import torch
from torch import Tensor

E2M1_MAX = 6.0
# By code: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, version 1.0).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_values(device: torch.device | None = None) -> Tensor:
    """The number of each code, float32 [16]."""
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=device)


def e2m1_codes(x: Tensor) -> Tensor:
    """The code of the nearest number, uint8; ties go to the even code, and beyond 6 it saturates."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    # Numbers are 1/2 apart below 2, then 1, and above 4 they are 2 apart; round() is to even, as codes are.
    codes = torch.where(
        magnitude < 2,
        (magnitude * 2).round(),
        torch.where(magnitude < 4, magnitude.round() + 2, (magnitude / 2).round() + 4),
    )
    return codes.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def pack(codes_K: Tensor) -> Tensor:
    """uint8 codes below 16 [..., K] in [..., ceil(K / 2)] bytes; an odd last one has an empty upper half."""
    if codes_K.shape[-1] % 2:
        codes_K = torch.nn.functional.pad(codes_K, (0, 1))
    return codes_K[..., ::2] | (codes_K[..., 1::2] << 4)


def unpack(bytes_B: Tensor, columns: int) -> Tensor:
    """The first `columns` codes of packed bytes, uint8 [..., columns]."""
    return torch.stack((bytes_B & 15, bytes_B >> 4), dim=-1).flatten(-2)[..., :columns]
