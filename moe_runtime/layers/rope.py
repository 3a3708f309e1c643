"""Rotary position embedding, half-split layout (Su et al. 2021, as in GPT-NeoX and Llama checkpoints).

Legend: T tokens, N heads, D head dimension, F = D / 2 frequencies.
"""

import torch
from torch import Tensor


class RotaryTable:
    """cos and sin for any positions of one RopeSpec's frequencies, computed once a step for all layers."""

    def __init__(self, inv_freq: tuple[float, ...], scale: float = 1.0, device: torch.device | str = "cpu") -> None:
        self._inv_freq_F = torch.tensor(inv_freq, dtype=torch.float32, device=device)
        self._scale = scale

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos_TD, sin_TD) in `dtype`; sin's first half is negated, the form that apply_rope takes."""
        angles_TF = positions_T.to(torch.float32)[:, None] * self._inv_freq_F
        cos_TF, sin_TF = angles_TF.cos() * self._scale, angles_TF.sin() * self._scale
        return torch.cat((cos_TF, cos_TF), dim=-1).to(dtype), torch.cat((-sin_TF, sin_TF), dim=-1).to(dtype)


def apply_rope(x_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each pair (d, d + D/2) of every head by its position's angle; cos and sin come from RotaryTable."""
    # Swapping the halves and negating sin's first half is rotate-half in one op fewer.
    swapped_TND = x_TND.roll(x_TND.shape[-1] // 2, -1)
    return torch.addcmul(x_TND * cos_TD[:, None], swapped_TND, sin_TD[:, None])
