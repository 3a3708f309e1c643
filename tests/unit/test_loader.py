"""Every fault of a checkpoint is an error that names its tensor or file, and each role reads only what it owns."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.models.demo.random_models import write_random_model
from moe_runtime.models.loader import Checkpoint, fingerprint, open_checkpoint
from moe_runtime.models.registry import FAMILIES, load_spec
from moe_runtime.models.weight_roles import role_of
from moe_runtime.quant.formats import plain_format

FLOAT32 = plain_format(torch.float32)
Tensors = dict[str, Tensor]
W1 = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def opened(model_dir: Path) -> Checkpoint:
    return open_checkpoint(model_dir, load_spec(model_dir))


def silent(fraction: float, what: str) -> None: ...


def edit(model_dir: Path, change: Callable[[Tensors], None]) -> None:
    file = model_dir / "model.safetensors"
    tensors = {name: x.clone() for name, x in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def shard(model_dir: Path, shards: int = 3) -> dict[str, str]:
    """Deal the single file's tensors to several files with an index; returns the index's map."""
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    shard_of = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(sorted(tensors))}
    for name in set(shard_of.values()):
        save_file({key: x.clone() for key, x in tensors.items() if shard_of[key] == name}, model_dir / name)
    file.unlink()
    write_index(model_dir, shard_of)
    return shard_of


def write_index(model_dir: Path, shard_of: dict[str, str]) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    write_random_model("mixtral", tmp_path)
    return tmp_path


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    write_random_model("mixtral", tmp_path, fused=True)
    return tmp_path


FAULTS: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("missing expert", lambda t: t.pop(W1), f"tensor {W1} is missing"),
    (
        "missing layer",
        lambda t: [t.pop(name) for name in list(t) if ".layers.2." in name],
        r"tensor model\.layers\.2\.input_layernorm\.weight is missing, and \d+ more",
    ),
    ("missing head", lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
    (
        "renamed",
        lambda t: t.update({W1.replace("w1", "v1"): t.pop(W1)}),
        rf"tensor {W1} is missing \(left over: model\.layers\.1\.block_sparse_moe\.experts\.3\.v1\.weight\)",
    ),
    (
        "bias that the config denies",
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        r"tensor model\.layers\.0\.self_attn\.q_proj\.bias \[64\] in model\.safetensors is left over",
    ),
    (
        "one expert too many",
        lambda t: t.update({W1.replace(".3.", ".8."): t[W1].clone()}),
        r"experts\.8\.w1\.weight .* is left over",
    ),
    (
        "one layer too many",
        lambda t: t.update({W1.replace("layers.1", "layers.3"): t[W1].clone()}),
        r"layers\.3\.block_sparse_moe.* is left over",
    ),
    ("wrong shape", lambda t: t.update({W1: t[W1].T.contiguous()}), rf"{W1} in .* \[64, 96\]: expected \[96, 64\]"),
    ("wrong dtype", lambda t: t.update({W1: t[W1].to(torch.int8)}), rf"{W1} in .* has dtype I8: expected F64, F32"),
    (
        "two names",
        lambda t: t.update({W1.replace("block_sparse_moe", "mlp"): t[W1].clone()}),
        "are two names of one tensor",
    ),
    (
        "fused beside apart",
        lambda t: t.update({GATE_UP: torch.zeros(8, 192, 64)}),
        r"tensor model\.layers\.1\.block_sparse_moe\.experts\.down_proj is missing .*left over: .*w[123]\.weight",
    ),
]


@pytest.mark.parametrize(("change", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_faults_name_the_tensor(change: Callable[[Tensors], None], message: str, mixtral: Path) -> None:
    edit(mixtral, change)
    with pytest.raises(CheckpointError, match=message):
        opened(mixtral)


def test_fused_faults(fused: Path) -> None:
    edit(fused, lambda t: t.update({GATE_UP: t[GATE_UP][:7].contiguous()}))
    with pytest.raises(CheckpointError, match=rf"{GATE_UP} in .* \[7, 192, 64\]: expected \[8, 192, 64\]"):
        opened(fused)


def test_known_buffers_are_ignored(mixtral: Path) -> None:
    edit(mixtral, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    opened(mixtral)


def test_a_tied_head_in_the_checkpoint_must_equal_the_embedding(tmp_path: Path) -> None:
    write_random_model("olmoe", tmp_path, overrides={"tie_word_embeddings": True})
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    weights = opened(tmp_path).attention_weights(torch.float32, silent)
    assert weights.lm_head_VH is weights.embed_VH
    edit(tmp_path, lambda t: t["lm_head.weight"][5].add_(1))
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight differs from model\.embed_tokens\.weight"):
        opened(tmp_path).attention_weights(torch.float32, silent)


def test_truncated_corrupt_and_missing_files(mixtral: Path) -> None:
    file = mixtral / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-10], whole[:100], whole[:4], b"", b"\xff" * 200):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=re.escape(f"{file} is truncated or corrupt")):
            opened(mixtral)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        opened(mixtral)


def test_shards(mixtral: Path) -> None:
    expected = opened(mixtral).expert(1, 3, FLOAT32)
    shard_of = shard(mixtral)
    loaded = opened(mixtral).expert(1, 3, FLOAT32)
    assert torch.equal(loaded.gate_up_2IH, expected.gate_up_2IH) and torch.equal(loaded.down_HI, expected.down_HI)

    write_index(mixtral, {name: file for name, file in shard_of.items() if name != W1})
    with pytest.raises(CheckpointError, match=rf"{W1} is in model-\d\.safetensors, but .*index\.json says None"):
        opened(mixtral)
    write_index(mixtral, shard_of | {"model.extra": "model-0.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor model\.extra is not in model-0\.safetensors, where"):
        opened(mixtral)
    write_index(mixtral, shard_of | {"model.extra": "../outside.safetensors"})
    with pytest.raises(CheckpointError, match="weight_map must map tensor names to file names"):
        opened(mixtral)
    write_index(mixtral, shard_of)
    (mixtral / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors does not exist"):
        opened(mixtral)


def test_each_tensor_has_one_owner(mixtral: Path) -> None:
    spec = load_spec(mixtral)
    for name in load_file(mixtral / "model.safetensors"):
        role = role_of(name, spec, FAMILIES["mixtral"])
        assert role is not None
        assert role.owner == ("ffn" if ".experts." in name else "attention"), name


def test_weights_outlive_the_file_and_have_the_dtype_asked_for(mixtral: Path) -> None:
    stored = {name: x.clone() for name, x in load_file(mixtral / "model.safetensors").items()}
    checkpoint = opened(mixtral)
    fractions: list[float] = []
    weights = checkpoint.attention_weights(torch.bfloat16, lambda fraction, what: fractions.append(fraction))
    expert = checkpoint.expert(1, 3, FLOAT32)
    del checkpoint
    (mixtral / "model.safetensors").write_bytes(b"\0" * (mixtral / "model.safetensors").stat().st_size)
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert weights.layers[0].qkv_PH.dtype == torch.bfloat16
    router_EH = weights.layers[0].router_EH
    assert router_EH is not None and router_EH.dtype == torch.float32
    assert torch.equal(router_EH, stored["model.layers.0.block_sparse_moe.gate.weight"])
    assert torch.equal(expert.gate_up_2IH, torch.cat((stored[W1], stored[W1.replace("w1", "w3")])))
    parts = [stored[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(weights.layers[0].qkv_PH, torch.cat(parts).bfloat16())


def test_experts_of_qwen2_in_logical_order(tmp_path: Path) -> None:
    """The shared expert comes after the routed ones, and a dense layer is expert 0."""
    write_random_model("qwen2_moe", tmp_path, overrides={"mlp_only_layers": [0]})
    stored, checkpoint = load_file(tmp_path / "model.safetensors"), opened(tmp_path)
    shared = checkpoint.expert(1, 8, FLOAT32)
    assert torch.equal(shared.down_HI, stored["model.layers.1.mlp.shared_expert.down_proj.weight"])
    dense = checkpoint.expert(0, 0, FLOAT32)
    assert torch.equal(dense.down_HI, stored["model.layers.0.mlp.down_proj.weight"])


def test_fingerprint_follows_config_table_and_sizes(mixtral: Path) -> None:
    first = fingerprint(mixtral)
    assert 0 <= first < 2**63 and fingerprint(mixtral) == first
    config = (mixtral / "config.json").read_text()
    (mixtral / "config.json").write_text(config + " ")
    assert fingerprint(mixtral) != first
    (mixtral / "config.json").write_text(config)
    assert fingerprint(mixtral) == first
    edit(mixtral, lambda t: t.update({W1: t[W1].bfloat16()}))
    assert fingerprint(mixtral) != first
