"""Qwen2-MoE: a shared expert behind its own gate, dense layers in between, windows layer by layer."""

import msgspec

from moe_runtime.models.family import DENSE_FFN, FUSED_EXPERTS, PROJ_EXPERTS, Family, HfConfig
from moe_runtime.models.hf_config import base_spec, refuse, routed_experts, window_of
from moe_runtime.models.spec import FfnSpec, LayerSpec, ModelSpec


def to_spec(config: HfConfig) -> ModelSpec:
    """A Qwen2MoeConfig as a ModelSpec."""
    if config.shared_expert_intermediate_size < 1:
        raise refuse("shared_expert_intermediate_size", config.shared_expert_intermediate_size, "at least 1")
    moe = FfnSpec(
        routed_experts(config, "num_experts"),
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        shared_intermediate=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    layers = [LayerSpec(ffn, _window(config, index)) for index, ffn in enumerate(ffn_layers(config, moe))]
    spec = base_spec(config, layers)
    return msgspec.structs.replace(spec, norm_topk=config.norm_topk_prob, qkv_bias=config.qkv_bias)


def ffn_layers(config: HfConfig, moe: FfnSpec) -> list[FfnSpec]:
    """Each layer's FFN: dense where mlp_only_layers says so or decoder_sparse_step skips it, else `moe`."""
    if config.decoder_sparse_step < 1:
        raise refuse("decoder_sparse_step", config.decoder_sparse_step, "at least 1")
    dense = FfnSpec(routed=0, top_k=0, intermediate=0, shared_intermediate=config.intermediate_size)
    return [
        dense if index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step else moe
        for index in range(config.num_hidden_layers)
    ]


def _window(config: HfConfig, layer: int) -> int | None:
    """transformers 5.24 derives layer_types from max_window_layers and then goes by layer_types alone."""
    kind = config.layer_types[layer]
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise refuse(f"layer_types[{layer}]", kind, "full_attention, sliding_attention")
    if not config.use_sliding_window:
        raise refuse(f"layer_types[{layer}]", kind, "full_attention, as use_sliding_window is false")
    return window_of(config)


FAMILY = Family(
    to_spec=to_spec,
    prefixes=("mlp",),
    moe_tensors={
        "gate.weight": "router",
        "shared_expert_gate.weight": "shared_gate",
        **{f"shared_expert.{name}": part for name, part in DENSE_FFN.items()},
        **PROJ_EXPERTS,
        **FUSED_EXPERTS,
    },
    dense_tensors=DENSE_FFN,
)
