"""What a decoder-only MoE model looks like: everything a node must know, free of any framework's config class.

Legend: V vocabulary, H hidden, D head dimension, I intermediate size, E routed experts.
The launcher derives the spec from the checkpoint's config.json once and sends it to every node.
"""

from typing import Literal

import msgspec

from eplb import LayerExperts


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary embedding (half-split layout): inverse frequencies [D/2] and the factor on cos and sin (YaRN's mscale)."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


class FfnSpec(msgspec.Struct, frozen=True):
    """One layer's FFN as logical experts: `routed` ones picked by the gate, and at most one that every token picks.

    A dense layer is routed=0 with shared_intermediate = the FFN's size. `shared_gate`: the shared expert's weight is
    sigmoid(x . gate) (Qwen2-MoE), else 1.
    """

    routed: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False

    @property
    def experts(self) -> LayerExperts:
        return LayerExperts(self.routed, 1 if self.shared_intermediate else 0)

    @property
    def picks(self) -> int:
        """Experts that one token visits: top_k routed ones plus the shared one."""
        return self.top_k + self.experts.shared

    def intermediate_of(self, expert: int) -> int:
        return self.intermediate if expert < self.routed else self.shared_intermediate


class LayerSpec(msgspec.Struct, frozen=True):
    """One decoder layer: `window` is the sliding window in tokens (itself included), None for full attention."""

    ffn: FfnSpec
    window: int | None = None


class ModelSpec(msgspec.Struct, frozen=True):
    """A whole model. Scales are 1 and clips None where a family has none."""

    family: str
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    norm_eps: float
    attention_scale: float
    # Softmax over all experts then top-k, or top-k of the logits then softmax over those (GraniteMoE).
    router: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    norm_topk: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    # RMS norm of q and k per head (Qwen3-MoE) or over the whole projection (OLMoE).
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_clip: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    tied_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "bfloat16"

    @property
    def experts(self) -> tuple[LayerExperts, ...]:
        return tuple(layer.ffn.experts for layer in self.layers)
