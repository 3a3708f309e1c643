"""Sparse upcycling of a dense FFN into experts that together are the same function.

Shape suffixes: D hidden, F dense intermediate, I expert intermediate, E experts, C copies, T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class UpcyclePlan:
    """`copies` copies of a layer's FFN, each cut into `shards` experts; a token's top-k is the shards of one copy."""

    copies: int = 8
    shards: int = 4

    @property
    def experts(self) -> int:
        return self.copies * self.shards


def mixtral_config(dense: Mapping[str, Any], plan: UpcyclePlan) -> dict[str, Any]:
    """The dense model's config.json turned into a Mixtral one."""
    kept = {name: value for name, value in dense.items() if name != "attention_bias"}
    return kept | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": dense["intermediate_size"] // plan.shards,
        "num_local_experts": plan.experts,
        "num_experts_per_tok": plan.shards,
        "sliding_window": None,
    }


def upcycle_layer(
    dense: Mapping[str, torch.Tensor], layer: int, router_CD: torch.Tensor, plan: UpcyclePlan, seed: int
) -> dict[str, torch.Tensor]:
    """One layer's tensors in Mixtral names: attention and norms as they are, the FFN as experts, the gate.

    Each copy orders the neurons in its own way before it is cut, and expert ids are shuffled in every layer, so that no
    two experts are alike and any mix-up shows. The gate's renormalised weights are 1/shards each; w2 times `shards` (a
    power of two, so exact) undoes them.
    """
    prefix = f"model.layers.{layer}."
    mlp_prefix, moe_prefix = prefix + "mlp.", prefix + "block_sparse_moe."
    tensors = {name: x for name, x in dense.items() if name.startswith(prefix) and not name.startswith(mlp_prefix)}
    w1_FD, w3_FD = dense[mlp_prefix + "gate_proj.weight"], dense[mlp_prefix + "up_proj.weight"]
    w2_FD = dense[mlp_prefix + "down_proj.weight"].T * plan.shards

    generator = np.random.default_rng([seed, layer])
    expert_of = generator.permutation(plan.experts).reshape(plan.copies, plan.shards)
    gate_ED = torch.empty(plan.experts, router_CD.shape[1], dtype=w1_FD.dtype)
    for copy in range(plan.copies):
        neurons_SI = torch.from_numpy(generator.permutation(len(w1_FD)).reshape(plan.shards, -1))
        for expert, neurons_I in zip(expert_of[copy].tolist(), neurons_SI, strict=True):
            gate_ED[expert] = router_CD[copy].to(w1_FD.dtype)
            expert_prefix = f"{moe_prefix}experts.{expert}."
            tensors[expert_prefix + "w1.weight"] = w1_FD[neurons_I]
            tensors[expert_prefix + "w2.weight"] = w2_FD[neurons_I].T.contiguous()
            tensors[expert_prefix + "w3.weight"] = w3_FD[neurons_I]
    tensors[moe_prefix + "gate.weight"] = gate_ED
    return tensors
