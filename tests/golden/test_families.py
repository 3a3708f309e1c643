"""Tiny random checkpoints of every family give transformers' fp32 logits, whatever their configs say."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe_runtime.models.demo.random_models import RANDOM_FAMILIES, write_random_model
from moe_runtime.models.loader import open_checkpoint
from moe_runtime.models.reference import reference_logits
from moe_runtime.models.registry import load_spec
from moe_runtime.quant.formats import plain_format

TOKENS = 48
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
QWEN2_DENSE = {"num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}

CASES: list[tuple[str, dict[str, Any]]] = [
    *[(family, {"tie_word_embeddings": tied}) for family in RANDOM_FAMILIES for tied in (False, True)],
    # transformers' YaRN fails on a Mixtral config without head_dim; ours derives it.
    *[("mixtral", {"rope_parameters": rope, "head_dim": 16}) for rope in (YARN, LLAMA3, LINEAR)],
    *[("qwen3_moe", {"rope_parameters": rope}) for rope in (YARN, LLAMA3)],
    ("granitemoe", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}}),
    ("mixtral", {"sliding_window": 7}),
    ("mixtral", {"sliding_window": 1}),
    ("mixtral", {"head_dim": 40, "num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}),
    (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 5}),
    *[("qwen2_moe", {"norm_topk_prob": norm}) for norm in (False, True)],
    ("qwen2_moe", {"qkv_bias": False}),
    ("qwen2_moe", QWEN2_DENSE),
    ("qwen3_moe", QWEN2_DENSE),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    *[(family, {"norm_topk_prob": norm}) for norm in (False, True) for family in ("qwen3_moe", "olmoe")],
    *[(family, {"attention_bias": True}) for family in ("qwen3_moe", "olmoe", "granitemoe")],
    ("olmoe", {"clip_qkv": 0.4}),
    ("granitemoe", {"residual_multiplier": 1.0, "logits_scaling": 6.0, "attention_multiplier": 0.015625}),
]


def name_of(case: tuple[str, Mapping[str, Any]]) -> str:
    family, overrides = case
    rope = overrides.get("rope_parameters")
    return f"{family}-{rope['rope_type'] if rope else '-'.join(f'{key}={value}' for key, value in overrides.items())}"


def our_logits(model_dir: Path, ids_T: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    spec = load_spec(model_dir)
    checkpoint = open_checkpoint(model_dir, spec)
    attention = checkpoint.attention_weights(dtype, lambda fraction, what: None)
    with torch.inference_mode():
        form = plain_format(dtype)
        return reference_logits(ids_T, spec, attention, lambda layer, expert: checkpoint.expert(layer, expert, form))


def assert_same_logits(ours_TV: Tensor, theirs_TV: Tensor) -> None:
    assert theirs_TV.std() > 0.1, "logits too small for the tolerance to mean anything"
    assert (ours_TV - theirs_TV).abs().max() <= 1e-4


def their_logits(model_dir: Path, ids_T: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    with torch.inference_mode():
        return model(ids_T[None]).logits[0]


def prompt() -> Tensor:
    return torch.randint(0, 512, (TOKENS,), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_logits_equal_transformers(case: tuple[str, dict[str, Any]], fused: bool, tmp_path: Path) -> None:
    family, overrides = case
    write_random_model(family, tmp_path / "model", seed=3, fused=fused, overrides=overrides)
    assert_same_logits(our_logits(tmp_path / "model", prompt()), their_logits(tmp_path / "model", prompt()))


def test_windows_and_ropes_change_the_logits(tmp_path: Path) -> None:
    """Guards the cases above: a setting that both sides ignored would pass them."""
    plain = tmp_path / "plain"
    write_random_model("mixtral", plain, seed=3, overrides={"head_dim": 16})
    for index, overrides in enumerate([{"sliding_window": 7}, {"rope_parameters": YARN}, {"rope_parameters": LINEAR}]):
        changed = tmp_path / str(index)
        write_random_model("mixtral", changed, seed=3, overrides={"head_dim": 16} | overrides)
        assert (our_logits(plain, prompt()) - our_logits(changed, prompt())).abs().max() > 0.1


def swap_axes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused experts stored input-first: [E, H, 2I] and [E, I, H]."""
    return {name: x.transpose(1, 2).contiguous() if x.dim() == 3 else x for name, x in tensors.items()}


def unfuse_granite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """GraniteMoE's fused experts as one tensor per expert and matrix, under Mixtral's names."""
    apart = {}
    for name, x in tensors.items():
        prefix = name.rpartition(".block_sparse_moe.")[0] + ".block_sparse_moe.experts"
        for expert, matrix in enumerate(x if x.dim() == 3 else []):
            if "input_linear" in name:
                gate, up = matrix.chunk(2)
                apart |= {f"{prefix}.{expert}.w1.weight": gate, f"{prefix}.{expert}.w3.weight": up}
            else:
                apart[f"{prefix}.{expert}.w2.weight"] = matrix
        if x.dim() != 3:
            apart[name] = x
    return {name: x.contiguous() for name, x in apart.items()}


@pytest.mark.parametrize(
    ("family", "overrides", "relayout"),
    [
        *[(family, {}, swap_axes) for family in RANDOM_FAMILIES],
        # 2I = H, then I = H: one tensor's shape reads both ways, and the other one tells.
        ("mixtral", {"intermediate_size": 32}, swap_axes),
        ("mixtral", {"intermediate_size": 64}, swap_axes),
        ("granitemoe", {}, unfuse_granite),
    ],
)
def test_other_layouts_give_the_same_logits(
    family: str,
    overrides: dict[str, Any],
    relayout: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    write_random_model(family, tmp_path, seed=3, fused=True, overrides=overrides)
    before = our_logits(tmp_path, prompt())
    file = tmp_path / "model.safetensors"
    tensors = {name: x.clone() for name, x in load_file(file).items()}
    changed = relayout(tensors)
    assert any(name not in tensors or x.shape != tensors[name].shape for name, x in changed.items())
    save_file(changed, file, metadata={"format": "pt"})
    assert torch.equal(our_logits(tmp_path, prompt()), before)


def test_bfloat16_is_as_close_to_float32_as_transformers(tmp_path: Path) -> None:
    """OLMoE, because its top-3 of 8 rarely flips under rounding: a flipped expert would drown what is measured."""
    write_random_model("olmoe", tmp_path, seed=3)
    exact_TV = their_logits(tmp_path, prompt())
    ours_TV = our_logits(tmp_path, prompt(), torch.bfloat16).float()
    theirs_TV = their_logits(tmp_path, prompt(), torch.bfloat16).float()
    assert (ours_TV - exact_TV).abs().median() < 1.25 * (theirs_TV - exact_TV).abs().median()
