"""An attention node's weights in the layout that this machine multiplies fastest with."""

from dataclasses import replace

from torch import Tensor

from moe_runtime.kernels.bank import Weight
from moe_runtime.kernels.linear import pack
from moe_runtime.models.weights import AttentionLayerWeights, AttentionWeights


def pack_attention(weights: AttentionWeights) -> AttentionWeights:
    """The same weights with every plain matrix packed for kernels.linear; the embedding is looked up by row and stays.

    A tied LM head thereby becomes a copy of its own. Where nothing can be packed the weights come back as they are.
    """
    return replace(
        weights,
        layers=tuple(_pack_layer(layer) for layer in weights.layers),
        lm_head_VH=_pack_plain(weights.lm_head_VH),
    )


def _pack_layer(layer: AttentionLayerWeights) -> AttentionLayerWeights:
    return replace(
        layer,
        qkv_PH=_pack_plain(layer.qkv_PH),
        o_HQ=_pack_plain(layer.o_HQ),
        router_EH=_pack_optional(layer.router_EH),
        shared_gate_1H=_pack_optional(layer.shared_gate_1H),
    )


def _pack_plain(weight: Weight) -> Weight:
    return pack(weight) if isinstance(weight, Tensor) else weight


def _pack_optional(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else pack(weight)
