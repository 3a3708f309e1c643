"""An attention node's weights in the form that this machine multiplies fastest with."""

from dataclasses import replace

from torch import Tensor

from moe_runtime.kernels.linear import LinearWeight, pack
from moe_runtime.kernels.registry import quantized_linear
from moe_runtime.models.weights import AttentionLayerWeights, AttentionWeights
from moe_runtime.quant.tensor import QuantizedTensor


def pack_attention(weights: AttentionWeights) -> AttentionWeights:
    """The same weights with every matrix as its back end likes it; the embedding is looked up by row and stays.

    A tied LM head thereby becomes a copy of its own. Where nothing can be packed plain weights come back as they are.
    """
    return replace(
        weights,
        layers=tuple(_pack_layer(layer) for layer in weights.layers),
        lm_head_VH=_packed(weights.lm_head_VH),
    )


def _pack_layer(layer: AttentionLayerWeights) -> AttentionLayerWeights:
    return replace(
        layer,
        qkv_PH=_packed(layer.qkv_PH),
        o_HQ=_packed(layer.o_HQ),
        router_EH=_pack_optional(layer.router_EH),
        shared_gate_1H=_pack_optional(layer.shared_gate_1H),
    )


def _packed(weight: LinearWeight) -> LinearWeight:
    if isinstance(weight, QuantizedTensor):
        return quantized_linear(weight)
    return pack(weight) if isinstance(weight, Tensor) else weight


def _pack_optional(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else pack(weight)
