"""RMS normalisation. Legend: ... any leading axes, H the normalised axis."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; sums are float32 in lower precisions too."""
    return F.rms_norm(x_H, weight_H.shape, weight_H, eps)
