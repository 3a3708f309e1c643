"""Qwen3-MoE: RMS norm on each head's q and k, dense layers in between, one window for all layers or none."""

import msgspec

from moe_runtime.models.family import DENSE_FFN, FUSED_EXPERTS, PROJ_EXPERTS, Family, HfConfig
from moe_runtime.models.hf_config import base_spec, refuse, routed_experts, window_of
from moe_runtime.models.qwen2_moe import ffn_layers
from moe_runtime.models.spec import FfnSpec, LayerSpec, ModelSpec


def to_spec(config: HfConfig) -> ModelSpec:
    """A Qwen3MoeConfig as a ModelSpec.

    transformers windows every layer of this family when use_sliding_window is set, whatever max_window_layers says;
    a config with layer_types of its own is refused, since the two would disagree.
    """
    if config.use_sliding_window and getattr(config, "layer_types", None) is not None:
        raise refuse("layer_types", config.layer_types, "no such key beside use_sliding_window")
    moe = FfnSpec(routed_experts(config, "num_experts"), config.num_experts_per_tok, config.moe_intermediate_size)
    window = window_of(config) if config.use_sliding_window else None
    spec = base_spec(config, [LayerSpec(ffn, window) for ffn in ffn_layers(config, moe)])
    bias = config.attention_bias
    return msgspec.structs.replace(spec, norm_topk=config.norm_topk_prob, qkv_bias=bias, o_bias=bias, qk_norm="head")


FAMILY = Family(
    to_spec=to_spec,
    prefixes=("mlp",),
    moe_tensors={"gate.weight": "router", **PROJ_EXPERTS, **FUSED_EXPERTS},
    dense_tensors=DENSE_FFN,
)
