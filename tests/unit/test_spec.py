"""Each family's config becomes a spec, and what a spec cannot say is refused by name with what is supported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_runtime.errors import ConfigError
from moe_runtime.models.hub import resolve_model
from moe_runtime.models.registry import FAMILIES, load_spec
from moe_runtime.models.spec import FfnSpec, ModelSpec

BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
    "dtype": "float16",
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16},
    "olmoe": {"num_experts": 8},
    "granitemoe": {"num_local_experts": 8},
}


def spec_of(folder: Path, family: str, overrides: dict[str, Any] | None = None) -> ModelSpec:
    config = {"model_type": family} | BASE | EXPERTS.get(family, {}) | (overrides or {})
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(folder)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_common_fields(family: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, family, {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "eos_token_id": [7, 9]})
    assert (spec.family, spec.vocab, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (
        family,
        300,
        64,
        4,
        2,
        16,
    )
    assert (spec.max_context, spec.norm_eps, spec.tied_embeddings, spec.eos_ids) == (512, 1e-3, True, (7, 9))
    assert (spec.checkpoint_dtype, len(spec.layers), spec.layers[0].ffn.routed) == ("float16", 4, 8)
    assert spec.rope.inv_freq == pytest.approx([10000.0 ** (-2 * i / 16) for i in range(8)])


def test_generation_config_names_the_eos_ids(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert spec_of(tmp_path, "mixtral", {"eos_token_id": 2}).eos_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text("{}")
    assert spec_of(tmp_path, "mixtral", {"eos_token_id": 2}).eos_ids == (2,)
    assert spec_of(tmp_path, "mixtral", {"eos_token_id": None}).eos_ids == ()


def test_dense_layers_are_one_expert_that_every_token_picks(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen2_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2})
    dense = FfnSpec(0, 0, 0, shared_intermediate=96)
    moe = FfnSpec(8, 2, 32, shared_intermediate=48, shared_gate=True)
    assert [layer.ffn for layer in spec.layers] == [dense, dense, dense, moe]


def test_windows(tmp_path: Path) -> None:
    def windows(family: str, overrides: dict[str, Any]) -> list[int | None]:
        return [layer.window for layer in spec_of(tmp_path, family, overrides).layers]

    on = {"use_sliding_window": True, "sliding_window": 9}
    assert windows("mixtral", {"sliding_window": 9}) == [9] * 4
    assert windows("mixtral", {"sliding_window": None}) == [None] * 4
    assert windows("qwen3_moe", on | {"max_window_layers": 1}) == [9] * 4
    assert windows("qwen3_moe", {"sliding_window": 9}) == [None] * 4
    assert windows("qwen2_moe", {"sliding_window": 9}) == [None] * 4
    assert windows("qwen2_moe", on | {"max_window_layers": 3}) == [9, None, 9, None]
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows("qwen2_moe", on | {"layer_types": kinds}) == [None, 9, None, 9]


def test_granite_multipliers(tmp_path: Path) -> None:
    scales = {
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 6,
        "attention_multiplier": 0.01,
    }
    spec = spec_of(tmp_path, "granitemoe", scales)
    assert (spec.embedding_scale, spec.residual_scale, spec.logits_divisor, spec.attention_scale) == (12, 0.22, 6, 0.01)
    assert spec.router == "topk_softmax"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_by_either_key_scales_and_stretches_the_context(key: str, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
    spec = spec_of(tmp_path, "qwen3_moe", {key: yarn})
    assert spec.rope.scale == pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1)
    assert spec.max_context == 2048
    assert spec.rope.inv_freq[0] == pytest.approx(1.0) and spec.rope.inv_freq[-1] == pytest.approx(
        1e4 ** (-14 / 16) / 4
    )


def test_every_rope_type_of_transformers_is_done_or_refused(tmp_path: Path) -> None:
    for kind in set(ROPE_INIT_FUNCTIONS) - {"linear", "llama3", "yarn"}:
        rope = {"rope_type": kind, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
        with pytest.raises(ConfigError, match=rf"rope_type is '{kind}': supported is default, linear, llama3, yarn"):
            spec_of(tmp_path, "mixtral", {"rope_scaling": rope, "head_dim": 16})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu': supported is 'silu'"),
    ("mixtral", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.bits is missing"),
    ("mixtral", {"quantization_config": {"quant_method": "quip"}}, "quant_method is 'quip': supported is 'compressed-"),
    ("mixtral", {"sliding_window": 0}, "sliding_window is 0: supported is null or at least 1"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9: supported is 1 to num_local_experts 8"),
    ("mixtral", {"num_key_value_heads": 3}, "num_attention_heads is 4: supported is a multiple of .* 3"),
    ("mixtral", {"hidden_size": 66}, "hidden_size is 66: supported is a multiple of num_attention_heads 4"),
    ("mixtral", {"head_dim": 3}, "head_dim is 3: supported is an even number"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: supported is 1.0"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts is 0: supported is at least 1"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0: supported is at least 1"),
    (
        "qwen3_moe",
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 4},
        "layer_types is .*: supported is no such key beside use_sliding_window",
    ),
    (
        "qwen2_moe",
        {"layer_types": ["sliding_attention"] * 4},
        r"layer_types\[0\] is 'sliding_attention': supported is full_attention, as use_sliding_window is false",
    ),
    ("qwen2_moe", {"layer_types": ["chunked_attention"] * 4}, r"layer_types\[0\] is 'chunked_attention': supported is"),
    (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size is 0: supported is at least",
    ),
    ("olmoe", {"sliding_window": 8}, "sliding_window is 8: supported is null, for olmoe"),
    ("granitemoe", {"sliding_window": 8}, "sliding_window is 8: supported is null, for granitemoe"),
    ("olmoe", {"clip_qkv": -1.0}, "clip_qkv is -1.0: supported is null or above 0"),
    ("granitemoe", {"logits_scaling": 0.0}, "logits_scaling is 0.0: supported is a finite number other than 0"),
    ("granitemoe", {"residual_multiplier": None}, "residual_multiplier is None: supported is a finite number"),
    ("llama", {}, "model_type is 'llama': supported are mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe"),
    ("mixtral", {"num_hidden_layers": "four"}, "refused by transformers"),
]


@pytest.mark.parametrize(("family", "overrides", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_by_name(family: str, overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(tmp_path, family, overrides)


def test_unreadable_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'config.json'} does not exist")):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{nonsense")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list: expected an object"):
        load_spec(tmp_path)


def test_resolve_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"model \./no/such is neither an existing directory nor a model id"):
        resolve_model("./no/such")
    with pytest.raises(ConfigError, match=r"model some/model is no directory here, not in Hugging Face's cache"):
        resolve_model("some/model")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file: expected a checkpoint's directory or a model id"):
        resolve_model(str(tmp_path / "file"))


def test_resolve_model_takes_a_whole_snapshot_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    assert resolve_model("some/model") == snapshot
