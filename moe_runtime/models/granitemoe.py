"""GraniteMoE: four multipliers, and a router that takes the softmax over the chosen logits only."""

import msgspec

from moe_runtime.models.family import FUSED_EXPERTS, W123_EXPERTS, Family, HfConfig
from moe_runtime.models.hf_config import base_spec, multiplier, refuse_window, routed_experts
from moe_runtime.models.spec import FfnSpec, LayerSpec, ModelSpec


def to_spec(config: HfConfig) -> ModelSpec:
    """A GraniteMoeConfig as a ModelSpec."""
    refuse_window(config)
    ffn = FfnSpec(routed_experts(config, "num_local_experts"), config.num_experts_per_tok, config.intermediate_size)
    return msgspec.structs.replace(
        base_spec(config, [LayerSpec(ffn)] * config.num_hidden_layers),
        router="topk_softmax",
        attention_scale=multiplier(config, "attention_multiplier"),
        embedding_scale=multiplier(config, "embedding_multiplier"),
        residual_scale=multiplier(config, "residual_multiplier"),
        logits_divisor=multiplier(config, "logits_scaling"),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )


FAMILY = Family(
    to_spec=to_spec,
    prefixes=("block_sparse_moe",),
    moe_tensors={
        "router.layer.weight": "router",
        "router.weight": "router",
        "input_linear.weight": "all_gate_up",
        "output_linear.weight": "all_down",
        **FUSED_EXPERTS,
        **W123_EXPERTS,
    },
)
