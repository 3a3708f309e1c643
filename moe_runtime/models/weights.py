"""The tensors each role holds, as plain frozen dataclasses; matrices may be quantized, or in a back end's own form.

Legend: V vocabulary, H hidden, D head dimension, Q = heads * D, P = (heads + 2 * kv_heads) * D, I intermediate,
E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_runtime.kernels.bank import Weight
from moe_runtime.kernels.linear import LinearWeight


@dataclass(frozen=True)
class AttentionLayerWeights:
    """The attention node's half of a layer; q, k and v are merged into one projection in that order."""

    input_norm_H: Tensor
    qkv_PH: LinearWeight
    o_HQ: LinearWeight
    post_norm_H: Tensor
    qkv_bias_P: Tensor | None = None
    o_bias_H: Tensor | None = None
    q_norm: Tensor | None = None  # [D] per head, or [heads * D] over the projection
    k_norm: Tensor | None = None
    router_EH: Tensor | None = None  # always float32; None in a dense layer
    shared_gate_1H: Tensor | None = None  # always float32


@dataclass(frozen=True)
class AttentionWeights:
    """Everything an attention node holds. lm_head_VH is embed_VH itself when embeddings are tied and it is plain."""

    embed_VH: Tensor
    layers: Sequence[AttentionLayerWeights]
    final_norm_H: Tensor
    lm_head_VH: LinearWeight


@dataclass(frozen=True)
class ExpertWeights:
    """One logical expert: gate rows then up rows in gate_up [2I, H], and down [H, I]."""

    gate_up_2IH: Weight
    down_HI: Weight
