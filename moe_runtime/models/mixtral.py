"""Mixtral: every layer routed, one sliding window for all layers or none."""

from moe_runtime.models.family import FUSED_EXPERTS, W123_EXPERTS, Family, HfConfig
from moe_runtime.models.hf_config import base_spec, routed_experts, window_of
from moe_runtime.models.spec import FfnSpec, LayerSpec, ModelSpec


def to_spec(config: HfConfig) -> ModelSpec:
    """A MixtralConfig as a ModelSpec; router_jitter_noise is for training only."""
    ffn = FfnSpec(routed_experts(config, "num_local_experts"), config.num_experts_per_tok, config.intermediate_size)
    return base_spec(config, [LayerSpec(ffn, window_of(config))] * config.num_hidden_layers)


FAMILY = Family(
    to_spec=to_spec,
    prefixes=("block_sparse_moe", "mlp"),
    moe_tensors={"gate.weight": "router", **W123_EXPERTS, **FUSED_EXPERTS},
)
