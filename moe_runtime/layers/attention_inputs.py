"""Projections around attention: hidden states to rotated q, k, v, and attention's output back to hidden states.

Legend: T tokens, H hidden, A heads, G KV heads, D head dimension, Q = A * D, P = (A + 2 * G) * D.
"""

import torch
from torch import Tensor

from moe_runtime.kernels.linear import linear
from moe_runtime.layers.norm import rms_norm
from moe_runtime.layers.rope import apply_rope
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.weights import AttentionLayerWeights


def project_qkv(
    x_TH: Tensor, weights: AttentionLayerWeights, spec: ModelSpec, cos_TD: Tensor, sin_TD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(q_TAD, k_TGD, v_TGD) of normalised hidden states, q and k rotated; bias, norm and clip as the family has them.

    cos_TD and sin_TD come from RotaryTable. The three are views of fewer tensors: copy before keeping one for long.
    """
    heads, kv_heads = spec.heads, spec.kv_heads
    qkv_TP = linear(x_TH, weights.qkv_PH, weights.qkv_bias_P)
    if spec.qk_norm == "full":
        qkv_TP = _norm_projections(qkv_TP, weights, spec)
    if spec.qkv_clip is not None:
        qkv_TP = qkv_TP.clamp_(-spec.qkv_clip, spec.qkv_clip)
    qkv_TND = qkv_TP.view(len(x_TH), heads + 2 * kv_heads, spec.head_dim)
    qk_TND, v_TGD = qkv_TND[:, : heads + kv_heads], qkv_TND[:, heads + kv_heads :]
    if spec.qk_norm == "head":
        qk_TND = _norm_heads(qk_TND, weights, spec)
    qk_TND = apply_rope(qk_TND, cos_TD, sin_TD)
    return qk_TND[:, :heads], qk_TND[:, heads:], v_TGD


def project_output(o_TQ: Tensor, weights: AttentionLayerWeights) -> Tensor:
    """Attention's concatenated heads [T, Q] to hidden states [T, H]."""
    return linear(o_TQ, weights.o_HQ, weights.o_bias_H)


def _norm_projections(qkv_TP: Tensor, weights: AttentionLayerWeights, spec: ModelSpec) -> Tensor:
    assert weights.q_norm is not None and weights.k_norm is not None
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    q_TQ, k_TR, v_TR = qkv_TP.split((q_rows, kv_rows, kv_rows), dim=-1)
    q_TQ, k_TR = rms_norm(q_TQ, weights.q_norm, spec.norm_eps), rms_norm(k_TR, weights.k_norm, spec.norm_eps)
    return torch.cat((q_TQ, k_TR, v_TR), dim=-1)


def _norm_heads(qk_TND: Tensor, weights: AttentionLayerWeights, spec: ModelSpec) -> Tensor:
    assert weights.q_norm is not None and weights.k_norm is not None
    q_TAD, k_TGD = qk_TND.split((spec.heads, spec.kv_heads), dim=1)
    q_TAD, k_TGD = rms_norm(q_TAD, weights.q_norm, spec.norm_eps), rms_norm(k_TGD, weights.k_norm, spec.norm_eps)
    return torch.cat((q_TAD, k_TGD), dim=1)
