"""`moe-runtime quantize`: whole or not at all, readable by others, and honest about what was lost."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from published import edit, quantization_of
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from moe_runtime.cli import run
from moe_runtime.errors import ConfigError
from moe_runtime.models.demo.random_models import write_random_model
from moe_runtime.models.loader import Checkpoint, open_checkpoint
from moe_runtime.models.quantized.command import quantize_checkpoint
from moe_runtime.models.quantized.perplexity import perplexity
from moe_runtime.models.quantized.report import Report
from moe_runtime.models.quantized.texts import text_tokens
from moe_runtime.models.reference import reference_logits
from moe_runtime.models.registry import load_spec
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.tensor import QuantizedTensor, dequantize

F32 = torch.float32
# Groups of 64 and blocks of 128 divide them, which compressed-tensors' library asks for.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 4}


def quietly(fraction: float, what: str) -> None: ...


def quantized(source: Path, out: Path, form: str, attention: str | None = None, **options: Any) -> Report:
    options = {"calibrate": False, "measure": False, "progress": quietly, **options}
    return quantize_checkpoint(source, out, FORMATS[form], FORMATS[attention] if attention else None, **options)


def opened(model_dir: Path) -> Checkpoint:
    return open_checkpoint(model_dir, load_spec(model_dir))


def logits(checkpoint: Checkpoint, ids_T: Tensor) -> Tensor:
    attention = checkpoint.attention_weights(F32, quietly)
    return reference_logits(
        ids_T,
        checkpoint.spec,
        attention,
        lambda layer, expert: checkpoint.expert(layer, expert, checkpoint.expert_format(layer, expert, F32)),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "plain"
    write_random_model("mixtral", path, overrides=SIZES)
    (path / "LICENSE").write_text("of the original")
    return path


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("form", "attention", "tolerance"),
    # int4 scales are float16, and the library multiplies in the dtype of the scales.
    [("w8a16", "w8a16", 0.0), ("w4a16-g64", "w8a16", 2e-3), ("fp8", None, 0.0), ("mxfp4", None, 0.0)],
)
def test_transformers_reads_what_is_written(
    form: str, attention: str | None, tolerance: float, source: Path, tmp_path: Path
) -> None:
    """Its own conversion has no int8 layout, zero points or blocks for experts: those are read by its library alone."""
    quantized(source, tmp_path / "out", form, attention)
    checkpoint, config = opened(tmp_path / "out"), AutoConfig.from_pretrained(tmp_path / "out")
    config.quantization_config["dequantize"] = True
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=config, dtype=F32)
    for layer in range(2):
        theirs = model.model.layers[layer]
        for number in range(4):
            ours = checkpoint.expert(layer, number, checkpoint.expert_format(layer, number, F32))
            assert isinstance(ours.gate_up_2IH, QuantizedTensor) and isinstance(ours.down_HI, QuantizedTensor)
            for mine, other in ((ours.gate_up_2IH, "gate_up_proj"), (ours.down_HI, "down_proj")):
                found = getattr(theirs.mlp.experts, other)[number].detach().float()
                torch.testing.assert_close(found, dequantize(mine), rtol=tolerance, atol=0)
    if form == "w8a16":
        ids_T = torch.arange(40) * 7 % 512
        with torch.inference_mode():
            torch.testing.assert_close(model(ids_T[None]).logits[0], logits(checkpoint, ids_T), rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hello")["input_ids"]


def test_everything_that_goes_with_the_weights_is_there(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "out", "w8a16")
    expected = {"LICENSE", "config.json", "generation_config.json", "model.safetensors", "quantization.json"}
    assert set(left_in(tmp_path / "out")) == {*expected, "tokenizer.json", "tokenizer_config.json"}
    plain, stored = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    for name, tensor in plain.items():
        if ".experts." not in name:
            assert torch.equal(stored[name], tensor), name
        else:
            assert name not in stored
    assert left_in(tmp_path) == ["out"]


def test_shards(source: Path, tmp_path: Path) -> None:
    """In a few files or in one: the same tensors, none above the limit unless it is one tensor's."""
    quantized(source, tmp_path / "one", "w4a16-g32-zp")
    quantized(source, tmp_path / "many", "w4a16-g32-zp", shard_bytes=100_000)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        part = load_file(shard)
        assert len(part) == 1 or sum(x.nbytes for x in part.values()) <= 100_000
        assert not tensors.keys() & part.keys()
        tensors |= part
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert tensors.keys() == whole.keys() and all(torch.equal(tensors[name], x) for name, x in whole.items())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())
    assert opened(tmp_path / "many").expert_format(1, 3, F32).name == "w4a16-g32-zp"


def test_the_report(source: Path, tmp_path: Path) -> None:
    report = quantized(source, tmp_path / "out", "w4a16-g64", "w8a16", measure=True)
    tree = json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert (tree["format"], tree["attention"], tree["source"]) == ("w4a16-g64", "w8a16", "plain")
    before, after = opened(source), opened(tmp_path / "out")
    errors = weights = 0.0
    for number in range(4):
        plain = before.expert(1, number, FORMATS["float32"])
        stored = after.expert(1, number, FORMATS["w4a16-g64"])
        for left, right in ((plain.gate_up_2IH, stored.gate_up_2IH), (plain.down_HI, stored.down_HI)):
            assert isinstance(left, Tensor) and isinstance(right, QuantizedTensor)
            errors += float((dequantize(right) - left).square().sum())
            weights += float(left.square().sum())
    assert report.layers[1].experts == pytest.approx((errors / weights) ** 0.5, rel=1e-4)
    assert 0.05 < report.layers[0].experts < 0.12 and report.lm_head is not None and 0.002 < report.lm_head < 0.01
    assert report.layers[0].attention is not None and 0.002 < report.layers[0].attention < 0.01
    assert report.bytes_before == sum(x.nbytes for x in load_file(source / "model.safetensors").values())
    assert report.bytes_after == sum(x.nbytes for x in load_file(tmp_path / "out" / "model.safetensors").values())
    assert report.perplexity is not None and report.perplexity.tokens == 512
    tokens_T = text_tokens(source, "prose")
    expected = torch.nn.functional.cross_entropy(logits(before, tokens_T)[:-1], tokens_T[1:]).exp()
    assert report.perplexity.before == pytest.approx(float(expected), rel=1e-4)
    assert report.perplexity.after == pytest.approx(perplexity(tmp_path / "out", tokens_T, quietly), rel=1e-4)
    assert report.perplexity.after != report.perplexity.before


def test_an_out_that_holds_something_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    quantized(source, out, "w8a16")  # an empty directory is free
    file = out / "model.safetensors"
    stamp = file.stat().st_mtime_ns
    again = quantized(source, out, "w8a16")
    assert file.stat().st_mtime_ns == stamp and again.format == "w8a16"
    with pytest.raises(ConfigError, match=r"out holds another quantized checkpoint \(w8a16 of plain\): remove it"):
        quantized(source, out, "w8a16", "w8a16")
    (out / "quantization.json").unlink()
    with pytest.raises(ConfigError, match="out holds something else: expected nothing or an empty directory"):
        quantized(source, out, "w8a16")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        quantized(source, tmp_path / "file", "w8a16")
    assert (tmp_path / "file").read_text() == "mine" and file.exists()


def test_what_cannot_be_quantized(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "w8", "w8a16")
    with pytest.raises(
        ConfigError, match=r"w8 is quantized already \(compressed-tensors\): expected a plain checkpoint"
    ):
        quantized(tmp_path / "w8", tmp_path / "out", "w8a16")
    with pytest.raises(ConfigError, match="--attention is fp8: expected one of w8a16, w4a16-g32"):
        quantized(source, tmp_path / "out", "w8a16", "fp8")
    with pytest.raises(ConfigError, match="--format is bfloat16: expected one of w8a16"):
        quantized(source, tmp_path / "out", "bfloat16")
    assert left_in(tmp_path) == ["w8"]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_leaves_nothing(call: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = getattr(os, call), []

    def fail_late(*arguments: Any) -> Any:
        calls.append(arguments)
        if call != "pwrite" or len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, call, fail_late)
    with pytest.raises(ConfigError, match="out cannot be written: No space left on device"):
        quantized(source, tmp_path / "out", "w8a16")
    assert left_in(tmp_path) == []


def test_short_writes_are_gone_on_with(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized(source, tmp_path / "whole", "w8a8")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[: 1 + len(data) // 2], offset))
    quantized(source, tmp_path / "out", "w8a8")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def stop(fraction: float, what: str) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(source, tmp_path / "out", "w8a16", progress=stop)
    assert left_in(tmp_path) == []


def test_a_signal_stops_the_command(source: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle of it: exit code 143 and no trace."""
    code = """
        import sys
        from moe_runtime.models.quantized import rewrite
        quantize = rewrite.quantize

        def slowly(weight, form):
            print("working", flush=True)
            sys.stdin.readline()
            return quantize(weight, form)

        rewrite.quantize = slowly
        from moe_runtime.cli import run
        sys.exit(run(["quantize", *sys.argv[1:], "--format", "w8a16", "--no-perplexity"]))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(source), str(tmp_path / "out")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "working\n"
        assert len(left_in(tmp_path)) == 1
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        process.stdin.write("go on\n" * 3)
        process.stdin.close()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert left_in(tmp_path) == []


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert (
        run(["quantize", str(source), str(out), "--format", "mxfp4", "--attention", "w4a16-g64", "--no-perplexity"])
        == 0
    )
    told = capsys.readouterr().out
    assert "LM head" in told and "plain as mxfp4, attention w4a16-g64" in told and "times smaller" in told
    assert "perplexity" not in told
    assert set(quantization_of(out)["config_groups"]) == {"experts", "attention"}
    assert run(["quantize", str(source), str(tmp_path / "no"), "--format", "int4"]) == 2
    assert "--format is 'int4': expected one of" in capsys.readouterr().err
    assert run(["quantize", str(tmp_path / "missing"), str(tmp_path / "no"), "--format", "fp8"]) == 2
    assert left_in(tmp_path) == ["out"]


def test_a_missing_tokenizer_is_said_before_anything_is_left(source: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((source / name).read_bytes())
    with pytest.raises(ConfigError, match="bare has no tokenizer that transformers can read"):
        quantized(bare, tmp_path / "out", "w8a16", measure=True)
    assert left_in(tmp_path) == ["bare"]


def test_plain_numbers_keep_their_dtype(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bf16"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((source / name).read_bytes())
    edit(copy, lambda t: t.update({name: x.bfloat16() for name, x in t.items()}))
    quantized(copy, tmp_path / "out", "fp8-block")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.norm.weight"].dtype == stored["lm_head.weight"].dtype == torch.bfloat16
    name = "model.layers.0.block_sparse_moe.experts.1.w1"
    assert stored[name + ".weight"].dtype == torch.float8_e4m3fn and stored[name + ".weight_scale"].shape == (2, 1)
