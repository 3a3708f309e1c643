"""Tiny random checkpoints of every family, made by transformers' own classes, for tests that need no real weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_runtime.models.demo.output import write_finished
from moe_runtime.models.demo.tokenizer import BYTE_SPECIALS, write_byte_tokenizer

_RECIPE = 1  # raise it whenever the bytes for the same arguments change
# Weights are drawn with this standard deviation over the root of their inputs: large enough that logits differ clearly.
_GAIN = 1.5

_SHARED: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
    "bos_token_id": BYTE_SPECIALS.index("<|im_start|>"),
    "eos_token_id": BYTE_SPECIALS.index("<|im_end|>"),
    "pad_token_id": BYTE_SPECIALS.index("<|endoftext|>"),
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 24, "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "granitemoe": {
        "num_local_experts": 8,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
    },
}
RANDOM_FAMILIES = tuple(_FAMILIES)


def write_random_model(
    family: str, out: Path, *, seed: int = 0, fused: bool = False, overrides: Mapping[str, object] | None = None
) -> None:
    """Writes a tiny fp32 checkpoint of `family`, random down to norms and biases, and a byte-level tokenizer to `out`.

    Experts lie as published checkpoints have them: a 2-D tensor for each matrix of each expert. `fused` writes the
    names that transformers has in memory: mlp.experts.gate_up_proj [E, 2I, H] and mlp.experts.down_proj [E, H, I].
    GraniteMoE is published fused (input_linear, output_linear), so that both mean the same for it. `overrides` sets
    config.json fields. Returns at once if `out` holds exactly this. Raises ValueError for an unknown family, for a
    vocabulary smaller than the tokenizer's alphabet, and where `out` is something else.
    """
    if family not in _FAMILIES:
        raise ValueError(f"random model family {family!r}: expected one of {', '.join(RANDOM_FAMILIES)}")
    settings = {**_SHARED, **_FAMILIES[family], **(overrides or {})}

    def fill(model_dir: Path, scratch: Path) -> None:
        write_byte_tokenizer(model_dir, settings["vocab_size"], settings["max_position_embeddings"])
        config = AutoConfig.for_model(family, dtype="float32", **settings)
        model = AutoModelForCausalLM.from_config(config)
        _randomize(model, seed)
        model.save_pretrained(model_dir)
        if fused and family != "granitemoe":
            save_file(_stored_once(model), model_dir / "model.safetensors", metadata={"format": "pt"})

    arguments = {"seed": seed, "fused": fused, "overrides": dict(overrides or {})}
    write_finished(out, {"model": f"random-{family}", "recipe": _RECIPE, **arguments}, fill)


@torch.no_grad()
def _randomize(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            parameter.normal_(0.0, _GAIN * parameter.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.5, generator=generator)


def _stored_once(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict without a tied LM head, which is the embedding under another name."""
    tied = model.config.tie_word_embeddings
    return {name: x for name, x in model.state_dict().items() if not (tied and name == "lm_head.weight")}
