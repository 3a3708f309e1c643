"""Quantized checkpoints through the loader: every kind that is published, in the families' own names and layouts."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from published import edit, publish, publish_gpt_oss, quantization_of, set_quantization
from torch import Tensor

from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.kernels.bank import Weight
from moe_runtime.models.demo.random_models import RANDOM_FAMILIES, write_random_model
from moe_runtime.models.loader import Checkpoint, open_checkpoint
from moe_runtime.models.quantized.command import quantize_checkpoint
from moe_runtime.models.registry import load_spec
from moe_runtime.quant.formats import FORMATS, QUANTIZED
from moe_runtime.quant.tensor import QuantizedTensor, dequantize

F32 = torch.float32


def opened(model_dir: Path) -> Checkpoint:
    return open_checkpoint(model_dir, load_spec(model_dir))


def plain(weight: Weight) -> Tensor:
    return dequantize(weight) if isinstance(weight, QuantizedTensor) else weight


def quietly(fraction: float, what: str) -> None: ...


def written(source: Path, out: Path, form: str, attention: str | None = None) -> Checkpoint:
    linears = FORMATS[attention] if attention else None
    quantize_checkpoint(source, out, FORMATS[form], linears, calibrate=False, measure=False, progress=quietly)
    return opened(out)


def same(left: Weight, right: Weight) -> None:
    """Bit for bit, format and all."""
    assert isinstance(left, QuantizedTensor) and isinstance(right, QuantizedTensor)
    assert left.format == right.format and left.shape == right.shape
    for name, part in left.parts.items():
        assert torch.equal(part.contiguous().view(torch.uint8), right.parts[name].contiguous().view(torch.uint8)), name


def expert(checkpoint: Checkpoint, layer: int, number: int, quant: str | None = None) -> tuple[Weight, Weight]:
    weights = checkpoint.expert(layer, number, checkpoint.expert_format(layer, number, F32, quant))
    return weights.gate_up_2IH, weights.down_HI


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    write_random_model("mixtral", tmp_path / "plain", overrides={"num_hidden_layers": 2})
    return tmp_path / "plain"


@pytest.fixture
def w4(mixtral: Path, tmp_path: Path) -> Path:
    """Experts in four bits with zero points, attention in eight."""
    written(mixtral, tmp_path / "w4", "w4a16-g32-zp", "w8a16")
    return tmp_path / "w4"


@pytest.mark.parametrize("form", QUANTIZED)
def test_quantized_ahead_is_quantized_at_load(form: str, mixtral: Path, tmp_path: Path) -> None:
    """What is stored without work on load is what work on load would have given."""
    ahead, at_load = written(mixtral, tmp_path / "out", form), opened(mixtral)
    assert {ahead.expert_format(1, number, F32).name for number in range(8)} <= {form, "fp8-g128"}
    for number in (0, 5):
        for left, right in zip(expert(ahead, 1, number), expert(at_load, 1, number, form), strict=True):
            if form == "fp8-block":  # blocks of the two matrices apart, and of both as one
                torch.testing.assert_close(plain(left), plain(right), rtol=0.15, atol=2e-3)
            else:
                same(left, right)


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
@pytest.mark.parametrize("fused", [False, True])
def test_every_family(family: str, fused: bool, tmp_path: Path) -> None:
    """Shared experts and dense layers are experts too; fused experts come apart; the rest stays what it is."""
    overrides = {"mlp_only_layers": [1]} if family.startswith("qwen") else {}
    write_random_model(family, tmp_path / "plain", fused=fused, overrides=overrides)
    before, after = opened(tmp_path / "plain"), written(tmp_path / "plain", tmp_path / "out", "w8a16", "w4a16-g32")
    for layer, spec in enumerate(before.spec.layers):
        for number in range(spec.ffn.experts.total):
            for left, right in zip(expert(before, layer, number, "w8a16"), expert(after, layer, number), strict=True):
                same(left, right)
    quantized = before.attention_weights(F32, quietly, "w4a16-g32")
    stored = after.attention_weights(F32, quietly)
    same(stored.lm_head_VH, quantized.lm_head_VH)
    assert torch.equal(stored.embed_VH, quantized.embed_VH)
    for left, right in zip(stored.layers, quantized.layers, strict=True):
        same(left.qkv_PH, right.qkv_PH)
        same(left.o_HQ, right.o_HQ)
        for part in ("input_norm_H", "post_norm_H", "qkv_bias_P", "q_norm", "k_norm", "router_EH", "shared_gate_1H"):
            mine, theirs = getattr(left, part), getattr(right, part)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), part


@pytest.mark.parametrize("kind", ["gptq", "awq", "fp8-blocks", "fp8-tensor"])
def test_published(kind: str, mixtral: Path) -> None:
    packed = publish(mixtral, kind)
    checkpoint = opened(mixtral)
    prefix = "model.layers.1.block_sparse_moe.experts.3."
    expected = [
        torch.cat([dequantize(packed[prefix + name]) for name in ("w1", "w3")]),
        dequantize(packed[prefix + "w2"]),
    ]
    if kind == "fp8-tensor":
        values = [
            torch.cat([packed[prefix + name].values.float() for name in ("w1", "w3")]),
            packed[prefix + "w2"].values,
        ]
        expected = [part.float() * 0.25 for part in values]
    names = {"gptq": "w4a16-g32-zp", "awq": "w4a16-g32-zp", "fp8-blocks": "fp8-g128", "fp8-tensor": "fp8"}
    assert checkpoint.expert_format(1, 3, F32).name == names[kind]
    tolerance = 0.004 if kind == "fp8-blocks" else 0.0  # scales in bfloat16
    for found, wanted in zip(expert(checkpoint, 1, 3), expected, strict=True):
        torch.testing.assert_close(plain(found), wanted, rtol=tolerance, atol=0)
    attention = checkpoint.attention_weights(F32, quietly)
    assert isinstance(attention.layers[0].qkv_PH, QuantizedTensor) and attention.layers[0].qkv_PH.shape == (128, 64)
    assert isinstance(attention.lm_head_VH, QuantizedTensor)


def test_gate_and_up_keep_their_blocks_where_rows_allow(tmp_path: Path) -> None:
    write_random_model("mixtral", tmp_path, overrides={"intermediate_size": 128, "num_hidden_layers": 1})
    publish(tmp_path, "fp8-blocks")
    checkpoint = opened(tmp_path)
    assert (
        checkpoint.expert_format(0, 0, F32).name == "fp8-block" == checkpoint.expert_format(0, 0, F32, "fp8-block").name
    )
    gate_up, down = expert(checkpoint, 0, 0)
    assert isinstance(gate_up, QuantizedTensor) and gate_up.scales_RC.shape == (2, 1)
    assert isinstance(down, QuantizedTensor) and down.format.name == "fp8-block"


def test_gpt_oss_experts(tmp_path: Path) -> None:
    write_random_model("qwen3_moe", tmp_path, fused=True)
    packed = publish_gpt_oss(tmp_path)
    checkpoint = opened(tmp_path)
    for number in (0, 7):
        gate_up, down = expert(checkpoint, 2, number)
        same(gate_up, packed[f"model.layers.2.mlp.experts.gate_up_proj.{number}"])
        same(down, packed[f"model.layers.2.mlp.experts.down_proj.{number}"])
    edit(tmp_path, lambda t: t.update({"model.layers.2.mlp.experts.gate_up_proj_bias": torch.zeros(8, 64)}))
    with pytest.raises(
        CheckpointError, match=r"tensor model\.layers\.2\.mlp\.experts\.gate_up_proj_bias .* is left over"
    ):
        opened(tmp_path)


def test_bfloat16_scales_of_int4_stay_exact(mixtral: Path, tmp_path: Path) -> None:
    written(mixtral, tmp_path / "out", "w4a16-g32")
    before = expert(opened(tmp_path / "out"), 0, 0)[0]

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name and name.endswith("weight_scale")]:
            tensors[name] = tensors[name].bfloat16()

    edit(tmp_path / "out", change)
    checkpoint = opened(tmp_path / "out")
    form = checkpoint.expert_format(0, 0, F32)
    gate_up = expert(checkpoint, 0, 0)[0]
    assert isinstance(gate_up, QuantizedTensor) and isinstance(before, QuantizedTensor)
    assert (form.name, form.scales) == ("w4a16-g32", F32) and gate_up.scales_RC.dtype == F32 and gate_up.format == form
    assert torch.equal(gate_up.scales_RC, before.scales_RC.bfloat16().float())
    assert gate_up.nbytes == form.nbytes(*gate_up.shape)
    assert checkpoint.expert_format(0, 0, F32, "w4a16-g32") == form


def test_formats_that_are_asked_for(mixtral: Path, w4: Path, tmp_path: Path) -> None:
    unquantized, stored = opened(mixtral), opened(w4)
    assert unquantized.expert_format(0, 0, torch.bfloat16) == FORMATS["bfloat16"]
    assert unquantized.expert_format(0, 0, F32, "mxfp4") == FORMATS["mxfp4"]
    assert stored.expert_format(0, 0, F32, "w4a16-g32-zp") == stored.expert_format(0, 0, F32) == FORMATS["w4a16-g32-zp"]
    stored.check_formats(F32, "w4a16-g32-zp", "w8a16")
    with pytest.raises(
        CheckpointError, match=r"w1\.weight_packed is stored as w4a16-g32-zp, but model\.quant is w8a16: exp"
    ):
        stored.check_formats(F32, "w8a16", None)
    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight_packed is stored as w8a16, but model\.attention_quant is w4a"
    ):
        stored.check_formats(F32, None, "w4a16-g32")
    with pytest.raises(CheckpointError, match=r"stored as w8a16, but model\.attention_quant is w4a16-g64"):
        stored.attention_weights(F32, quietly, "w4a16-g64")
    with pytest.raises(
        CheckpointError, match=r"stored as w4a16-g32-zp, but model\.quant is float32: expected null or w4a16"
    ):
        stored.expert_format(0, 0, F32, "float32")
    with pytest.raises(ConfigError, match=r"model.quant is 'w4': expected one of"):
        unquantized.check_formats(F32, "w4", None)
    int8 = written(mixtral, tmp_path / "int8", "w8a8")
    assert int8.expert_format(0, 0, F32, "w8a16") == FORMATS["w8a16"]
    assert torch.equal(plain(expert(int8, 0, 0, "w8a16")[0]), plain(expert(int8, 0, 0)[0]))


def test_weights_that_are_joined_must_be_stored_alike(w4: Path, mixtral: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.2.w3"
    kept = expert(opened(mixtral), 0, 2)[0]
    config = quantization_of(w4)

    def unpack(tensors: dict[str, Tensor]) -> None:
        for suffix in ("packed", "shape", "scale", "zero_point"):
            tensors.pop(f"{name}.weight_{suffix}")
        assert isinstance(kept, Tensor)
        tensors[name + ".weight"] = kept[96:]

    edit(w4, unpack)
    with pytest.raises(
        CheckpointError, match=rf"tensor {name}\.weight is plain, but .* expected {name}\.weight_packed"
    ):
        opened(w4)
    set_quantization(w4, {**config, "ignore": [*config["ignore"], name]})
    with pytest.raises(
        CheckpointError, match=r"w1\.weight_packed is stored as w4a16-g32-zp and .*w3\.weight as plain num"
    ):
        opened(w4).expert_format(0, 2, F32)


def test_a_tied_head_is_quantized_beside_a_plain_embedding(tmp_path: Path) -> None:
    write_random_model("olmoe", tmp_path / "plain", overrides={"tie_word_embeddings": True})
    at_load = opened(tmp_path / "plain").attention_weights(F32, quietly, "w8a16")
    stored = written(tmp_path / "plain", tmp_path / "out", "w8a16", "w8a16")
    assert not stored.spec.tied_embeddings
    same(stored.attention_weights(F32, quietly).lm_head_VH, at_load.lm_head_VH)
    assert written(tmp_path / "plain", tmp_path / "experts", "w8a16").spec.tied_embeddings


def test_weights_that_are_not_finite_are_refused_while_quantizing(mixtral: Path, tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    edit(mixtral, lambda t: t[name][3].fill_(float("inf")))
    with pytest.raises(CheckpointError, match=rf"{name}: the weight has numbers that are not finite"):
        expert(opened(mixtral), 0, 2, "w8a16")
    with pytest.raises(CheckpointError, match=rf"tensor {name}: the weight has numbers that are not finite"):
        written(mixtral, tmp_path / "out", "w8a16")
    assert not (tmp_path / "out").exists()


def test_quantized_weights_outlive_the_file(w4: Path) -> None:
    checkpoint = opened(w4)
    read = [*expert(checkpoint, 0, 0), checkpoint.attention_weights(F32, quietly).layers[0].o_HQ]
    before = [plain(weight).clone() for weight in read]
    del checkpoint
    (w4 / "model.safetensors").write_bytes(b"\0" * (w4 / "model.safetensors").stat().st_size)
    assert all(torch.equal(plain(weight), kept) for weight, kept in zip(read, before, strict=True))


def test_routers_may_be_quantized_and_are_read_as_numbers(mixtral: Path) -> None:
    packed = publish(mixtral, "awq", plain=("embed_tokens",))
    router_EH = opened(mixtral).attention_layer(1, torch.bfloat16).router_EH
    assert router_EH is not None and router_EH.dtype == F32
    assert torch.equal(router_EH, dequantize(packed["model.layers.1.block_sparse_moe.gate"]))


def test_nothing_keeps_the_plain_weights_alive(tmp_path: Path) -> None:
    """Resident anonymous memory after quantizing at load, against what the quantized experts take."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_local_experts": 16}
    write_random_model("mixtral", tmp_path / "plain", overrides=sizes)
    code = """
        import sys
        from pathlib import Path
        import torch
        from moe_runtime.models.heap import trim_heap
        from moe_runtime.models.loader import open_checkpoint
        from moe_runtime.models.registry import load_spec
        from moe_runtime.quant.formats import FORMATS
        from moe_runtime.quant.quantize import quantize

        def resident():
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

        torch.set_num_threads(1)
        model_dir = Path(sys.argv[1])
        checkpoint = open_checkpoint(model_dir, load_spec(model_dir))
        form = FORMATS["w8a16"]
        checkpoint.expert(0, 0, form)  # the allocator's own needs
        trim_heap()
        before = resident()
        kept = [checkpoint.expert(layer, number, form) for layer in range(4) for number in range(16)]
        trim_heap()
        expected = sum(w.nbytes for e in kept for w in (e.gate_up_2IH, e.down_HI))
        print(resident() - before, expected)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "plain")],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, expected = map(int, done.stdout.split())
    assert expected == 64 * FORMATS["w8a16"].nbytes(1024, 256) + 64 * FORMATS["w8a16"].nbytes(256, 512)
    assert expected * 0.8 < grown < expected * 1.1  # the plain ones would be four times as much
