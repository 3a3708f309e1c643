"""OLMoE: RMS norm over the whole q and k projections, then clipping."""

import msgspec

from moe_runtime.models.family import FUSED_EXPERTS, PROJ_EXPERTS, Family, HfConfig
from moe_runtime.models.hf_config import base_spec, refuse, refuse_window, routed_experts
from moe_runtime.models.spec import FfnSpec, LayerSpec, ModelSpec


def to_spec(config: HfConfig) -> ModelSpec:
    """An OlmoeConfig as a ModelSpec."""
    refuse_window(config)
    if config.clip_qkv is not None and config.clip_qkv <= 0:
        raise refuse("clip_qkv", config.clip_qkv, "null or above 0")
    ffn = FfnSpec(routed_experts(config, "num_experts"), config.num_experts_per_tok, config.intermediate_size)
    spec = base_spec(config, [LayerSpec(ffn)] * config.num_hidden_layers)
    bias, clip = config.attention_bias, config.clip_qkv
    return msgspec.structs.replace(
        spec, norm_topk=config.norm_topk_prob, qkv_bias=bias, o_bias=bias, qk_norm="full", qkv_clip=clip
    )


FAMILY = Family(
    to_spec=to_spec,
    prefixes=("mlp",),
    moe_tensors={"gate.weight": "router", **PROJ_EXPERTS, **FUSED_EXPERTS},
)
