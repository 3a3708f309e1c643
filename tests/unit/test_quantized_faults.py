"""A quantized checkpoint with a fault is refused by the name of its tensor, a configuration by that of its key."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import edit, publish, publish_gpt_oss, quantization_of, set_quantization
from torch import Tensor

from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.models.demo.random_models import write_random_model
from moe_runtime.models.loader import open_checkpoint
from moe_runtime.models.quantized.command import quantize_checkpoint
from moe_runtime.models.registry import load_spec
from moe_runtime.quant.checkpoints.read import read_quantization
from moe_runtime.quant.formats import FORMATS

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2"


def read_all(model_dir: Path) -> None:
    """What both roles read."""
    checkpoint = open_checkpoint(model_dir, load_spec(model_dir))
    checkpoint.attention_weights(torch.float32, lambda *_: None)
    for layer, spec in enumerate(checkpoint.spec.layers):
        for expert in range(spec.ffn.experts.total):
            checkpoint.expert(layer, expert, checkpoint.expert_format(layer, expert, torch.float32))


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint by what its experts are stored as, to be copied."""
    root = tmp_path_factory.mktemp("stored")
    plain = root / "plain"
    write_random_model("mixtral", plain, overrides={"num_hidden_layers": 2, "num_local_experts": 4})

    def of(kind: str) -> Path:
        out = root / kind
        if not out.exists():
            if kind in FORMATS:
                quantize_checkpoint(
                    plain, out, FORMATS[kind], None, calibrate=False, measure=False, progress=lambda *_: None
                )
            else:
                copied(plain, out)
                publish(out, kind, plain=("gate", "embed_tokens", "lm_head"))
            read_all(out)
        return out

    return of


def copied(source: Path, out: Path) -> Path:
    out.mkdir()
    for file in source.iterdir():
        if file.name != "demo_model.json":
            (out / file.name).write_bytes(file.read_bytes())
    return out


def put(suffix: str, value: Tensor) -> Change:
    return lambda t: t.update({EXPERT + suffix: value})


def poke(suffix: str, index: tuple[int, ...], value: float) -> Change:
    return lambda t: t[EXPERT + suffix].__setitem__(index, value)


def reshape(suffix: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda t: t.update({EXPERT + suffix: change(t[EXPERT + suffix])})


# By format: what is done to experts.3.w2 [64, 96] of layer 1, and what is said of it.
FAULTS: list[tuple[str, Change, str]] = [
    ("w8a16", lambda t: t.pop(EXPERT + ".weight_scale"), "weight_scale is missing beside .*w2.weight_packed"),
    ("w8a8", lambda t: t.pop(EXPERT + ".weight_scale"), "weight_scale is missing beside .*w2.weight, stored as int-q"),
    ("w8a8", lambda t: t.pop(EXPERT + ".weight"), "w2.weight is missing beside .*w2.weight_scale"),
    ("w8a8", lambda t: [t.pop(name) for name in list(t) if EXPERT in name], "w2.weight is missing"),
    ("w4a16-g32", lambda t: [t.pop(name) for name in list(t) if EXPERT in name], "w2.weight_packed is missing"),
    ("w8a16", reshape(".weight_scale", lambda x: x[:63]), r"weight_scale .* has shape \[63, 1\]: expected \[64, 1\]"),
    ("w8a16", reshape(".weight_scale", lambda x: x.double()), "weight_scale .* dtype F64: expected F16, BF16, F32"),
    ("w8a8", reshape(".weight", lambda x: x.float()), "w2.weight .* has dtype F32: expected I8"),
    ("w8a8", reshape(".weight", lambda x: x.T), r"w2.weight .* has shape \[96, 64\]: expected \[64, 96\]"),
    ("w8a8", put(".weight_zero_point", torch.zeros(64, 1, dtype=torch.int8)), "w2.weight_zero_point .* is left over"),
    ("w4a16-g32", put(".weight_zero_point", torch.zeros(8, 3, dtype=torch.int32)), "weight_zero_point .* is left over"),
    ("w4a16-g32-zp", lambda t: t.pop(EXPERT + ".weight_zero_point"), "weight_zero_point is missing beside"),
    ("w4a16-g32", reshape(".weight_scale", lambda x: x[:, :2]), r"has shape \[64, 2\]: expected \[64, 3\]"),
    ("w4a16-g32", reshape(".weight_packed", lambda x: x.view(torch.uint8)), r"packed .* has shape \[64, 48\]: "),
    ("w4a16-g32", put(".weight", torch.zeros(64, 96)), "w2.weight and .*w2.weight_packed are two names"),
    ("w4a16-g32", put(".weight_shape", torch.tensor([64, 95])), r"_shape in .* holds \[64, 95\]: expected \[64, 96"),
    ("w4a16-g32", put(".weight_shape", torch.tensor([64, 96.0])), "weight_shape .* has dtype F32: expected I64, I32"),
    ("w4a16-g32", poke(".weight_scale", (5, 1), float("nan")), r"_scale in .* scale \[5, 1\] is nan: expected a fin"),
    ("w4a16-g32", poke(".weight_scale", (5, 2), 0.0), r"weight_scale in .* scale \[5, 2\] is 0.0: expected a finite"),
    ("w8a16", poke(".weight_scale", (63, 0), -0.5), r"weight_scale in .* scale \[63, 0\] is -0.5"),
    ("w8a8", poke(".weight_scale", (7, 0), float("inf")), r"weight_scale in .* scale \[7, 0\] is inf"),
    ("mxfp4", poke(".weight_scale", (7, 1), 255), r"weight_scale in .* scale \[7, 1\] is 255 \(not a number\)"),
    ("mxfp4", reshape(".weight_scale", lambda x: x.float()), "weight_scale .* has dtype F32: expected U8"),
    ("fp8", lambda t: t[EXPERT + ".weight"].view(torch.uint8)[3].fill_(0xFF), "w2.weight in .* numbers that are not f"),
    ("fp8-block", reshape(".weight_scale", lambda x: x.repeat(2, 1)), r"has shape \[2, 1\]: expected \[1, 1\]"),
    ("gptq", lambda t: t.pop(EXPERT + ".qzeros"), "w2.qzeros is missing beside"),
    ("gptq", lambda t: t.pop(EXPERT + ".qweight"), "w2.qweight is missing beside"),
    ("gptq", lambda t: t[EXPERT + ".g_idx"].copy_(t[EXPERT + ".g_idx"].flip(0)), "g_idx in .* out of order .desc_act"),
    ("gptq", poke(".scales", (1, 9), 0.0), r"w2.scales in .* scale \[9, 1\] is 0.0"),
    ("gptq", reshape(".g_idx", lambda x: x[:95]), r"g_idx .* has shape \[95\]: expected \[96\]"),
    ("awq", reshape(".qzeros", lambda x: x[:2]), r"w2.qzeros .* has shape \[2, 8\]: expected \[3, 8\]"),
    ("awq", reshape(".qweight", lambda x: x.T), r"w2.qweight .* has shape \[8, 96\]: expected \[96, 8\]"),
    ("awq", lambda t: t.pop(EXPERT + ".scales"), "w2.scales is missing beside"),
    ("fp8-block", lambda t: t.pop(EXPERT + ".weight_scale"), "_scale is missing beside .*w2.weight, stored as naive"),
    ("fp8-tensor", lambda t: t.pop(EXPERT + ".weight_scale"), "_scale is missing beside .*w2.weight, stored as fp8"),
    ("fp8-blocks", lambda t: t.pop(EXPERT + ".weight_scale_inv"), "_inv is missing beside .*w2.weight, stored as fp8"),
    ("fp8-blocks", poke(".weight_scale_inv", (0, 0), 0.0), r"_inv in .* scale \[0, 0\] is 0.0"),
    ("fp8-blocks", reshape(".weight_scale_inv", lambda x: x.half().view(torch.int16)), "_inv .* has dtype I16"),
    ("fp8-tensor", put(".weight_scale", torch.ones(64, 1)), r"has shape \[64, 1\]: expected \[1\] or \[1, 1\] or \[\]"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), FAULTS, ids=[f"{i}-{f[0]}" for i, f in enumerate(FAULTS)])
def test_faults_name_the_tensor(
    kind: str, change: Change, message: str, stored: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = copied(stored(kind), tmp_path / "broken")
    edit(broken, change)
    with pytest.raises(CheckpointError, match=message) as error:
        read_all(broken)
    assert re.search(re.escape(EXPERT.removesuffix("w2")) + "(w2|w1)", str(error.value))


@pytest.mark.parametrize("suffix", [".weight_packed", ".weight_zero_point"])
def test_bits_beyond_the_weight_are_refused(suffix: str, tmp_path: Path) -> None:
    """100 columns fill twelve and a half words, 100 rows as many words of zero points."""
    sizes = {"hidden_size": 100, "intermediate_size": 100, "num_hidden_layers": 2, "head_dim": 24}
    write_random_model("mixtral", tmp_path / "plain", overrides=sizes)
    out = tmp_path / "out"
    quantize_checkpoint(
        tmp_path / "plain", out, FORMATS["w4a16-g32-zp"], None, calibrate=False, measure=False, progress=lambda *_: None
    )
    read_all(out)
    edit(out, lambda t: t[EXPERT + suffix].view(torch.uint8).select(-1 if "packed" in suffix else 0, -1).fill_(1))
    with pytest.raises(CheckpointError, match=rf"{EXPERT}{suffix} in .* has bits beyond (column|row) 99"):
        read_all(out)


def test_gpt_oss_faults(tmp_path: Path) -> None:
    write_random_model("qwen3_moe", tmp_path / "plain", fused=True)
    publish_gpt_oss(tmp_path / "plain")
    name = "model.layers.1.mlp.experts.down_proj"
    for number, (change, message) in enumerate(
        [
            (lambda t: t[name + "_scales"][3].fill_(255), rf"{name}_scales in .* 255 \(not a number\)"),
            (lambda t: t.pop(name + "_scales"), f"{name}_scales is missing beside {name}_blocks, stored as mxfp4"),
            (
                lambda t: t.update({name + "_blocks": t[name + "_blocks"][:7]}),
                rf"{name}_blocks .* shape \[7, 64, 1, 16\]",
            ),
        ]
    ):
        broken = copied(tmp_path / "plain", tmp_path / f"broken{number}")
        edit(broken, change)
        with pytest.raises(CheckpointError, match=message):
            read_all(broken)


def test_parts_must_agree_with_the_configuration(stored: Callable[[str], Path], tmp_path: Path) -> None:
    broken = copied(stored("w4a16-g32"), tmp_path / "broken")
    config = quantization_of(broken)
    set_quantization(broken, {**config, "ignore": [r"re:.*layers\.1\..*"]})
    with pytest.raises(
        CheckpointError, match=r"experts\.\d\.w\d\.weight_\w+ is of a quantized weight, but .* leaves .* pl"
    ):
        read_all(broken)
    set_quantization(broken, None)
    with pytest.raises(CheckpointError, match=r"w1\.weight is missing, .*left over: .*weight_(packed|scale|shape)"):
        read_all(broken)
    groups = copy.deepcopy(config["config_groups"])
    groups["experts"]["weights"]["group_size"] = 64
    set_quantization(broken, {**config, "config_groups": groups})
    with pytest.raises(CheckpointError, match=r"weight_scale .* has shape \[\d+, [23]\]: expected \[\d+, [12]\]"):
        read_all(broken)
    groups["experts"]["weights"] |= {"group_size": 32, "symmetric": False}
    set_quantization(broken, {**config, "config_groups": groups})
    with pytest.raises(CheckpointError, match="weight_zero_point is missing beside"):
        read_all(broken)


def test_an_embedding_is_never_quantized(tmp_path: Path) -> None:
    write_random_model("mixtral", tmp_path)
    publish(tmp_path, "awq", plain=("gate",))
    with pytest.raises(
        CheckpointError, match=r"tensor model\.embed_tokens\.\w+ is stored as awq: expected plain numbers"
    ):
        read_all(tmp_path)


CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    "ignore": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def weights(**changes: Any) -> dict[str, Any]:
    group = CT["config_groups"]["group_0"]
    return {**CT, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def group(**changes: Any) -> dict[str, Any]:
    return {**CT, "config_groups": {"group_0": {**CT["config_groups"]["group_0"], **changes}}}


REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method is 'bitsandbytes': supported is 'compr"),
    ({"bits": 4}, "quantization_config.quant_method is missing"),
    ("gptq", "quantization_config is 'gptq': supported is an object"),
    ({**CT, "format": "nvfp4-pack-quantized"}, "group_0.format is 'nvfp4-pack-quantized': supported is pack-quant"),
    ({**CT, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}: supported is None"),
    ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is .*: supported is none, or"),
    ({**CT, "transform_config": {"R1": {}}}, "transform_config is"),
    ({**CT, "quantization_status": "calibration"}, "quantization_status is 'calibration': supported is 'compressed'"),
    ({**CT, "new_key": 1}, "quantization_config.new_key is 1: supported is no such key"),
    ({**CT, "config_groups": {}}, "config_groups is {}: supported is an object of objects"),
    (weights(num_bits=3), "group_0.weights.num_bits is 3: supported is 4, 8"),
    (weights(actorder="group"), "group_0.weights.actorder is 'group'"),
    (weights(dynamic=True), "weights.dynamic is True"),
    (weights(strategy="tensor_group"), "strategy tensor_group, .*: supported is int4 pack-quantized in groups"),
    (weights(group_size=48), "group 48, symmetric True': supported is int4 pack-quantized in groups"),
    (weights(group_size=16), "pack-quantized of int4, strategy group, group 16"),
    (weights(num_bits=8), "pack-quantized of int8, strategy group, group 32"),
    (weights(num_bits=8, strategy="channel", group_size=None, symmetric=False), "int8, strategy channel.* False"),
    (weights(type="float", num_bits=8), "pack-quantized of float8"),
    (weights(new=1), "group_0.weights.new is 1"),
    (group(targets=["LlamaAttention"]), "group_0.targets is 'LlamaAttention': supported is Linear, module names"),
    (group(targets=[]), "group_0.targets is"),
    (group(output_activations={"num_bits": 8}), "group_0.output_activations is"),
    (group(input_activations={"num_bits": 8, "dynamic": False}), "input_activations is .*: supported is 8 bits, sym"),
    (group(input_activations={"num_bits": 8, "dynamic": "local"}), "group_0.input_activations.dynamic is 'local'"),
    (group(weights=None), "group_0.weights is None: supported is an object"),
    ({**GPTQ, "bits": 3}, "quantization_config.bits is 3: supported is 4, 8"),
    ({**GPTQ, "bits": True}, "quantization_config.bits is True"),
    ({**GPTQ, "bits": 8}, "bits is 8: supported is 4, or 8 with group_size -1 and sym true"),
    ({**GPTQ, "group_size": 40}, "group_size is 40: supported is -1 or a multiple of 32"),
    ({**GPTQ, "group_size": 0}, "group_size is 0"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin': supported is 'gptq', 'gptq_v2'"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True"),
    ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype is 'int8'"),
    ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic is .*: supported is patterns of modules to skip"),
    ({**GPTQ, "rotation": "hadamard"}, "rotation is 'hadamard'"),
    ({**GPTQ, "novel": 1}, "quantization_config.novel is 1"),
    ({**AWQ, "bits": 8}, "quantization_config.bits is 8: supported is 4"),
    ({**AWQ, "version": "gemv"}, "version is 'gemv': supported is 'gemm'"),
    ({**AWQ, "zero_point": False}, "zero_point is False"),
    ({**AWQ, "group_size": 12}, "group_size is 12"),
    ({**FP8, "weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\]: supported is None, \[128, 128\]"),
    ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    ({**FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ({**FP8, "kv_cache_scheme": "static"}, "kv_cache_scheme is 'static'"),
    ({"quant_method": "mxfp4", "groups": 16}, "quantization_config.groups is 16"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_is_not_understood_is_refused_by_key(tree: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantization({"quantization_config": tree})


def test_old_places_of_the_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compression_config is .*: supported is quantization_config"):
        read_quantization({"compression_config": CT})
    write_random_model("mixtral", tmp_path)
    set_quantization(tmp_path, {**CT, "kv_cache_scheme": {}})
    with pytest.raises(ConfigError, match="kv_cache_scheme"):  # by the launcher already
        load_spec(tmp_path)


def test_rules_go_from_names_to_patterns_to_classes() -> None:
    eight = {"targets": [r"re:.*o_proj$"], "weights": {"num_bits": 8, "strategy": "channel"}}
    named = {"targets": ["a.b.o_proj"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}
    tree = {
        **CT,
        "config_groups": {**CT["config_groups"], "g1": eight, "g2": named},
        "ignore": [r"re:.*gate$", "lm_head"],
    }
    read = read_quantization({"quantization_config": tree})
    assert read is not None
    found = {
        module: scheme and scheme.format.name
        for module in ("a.b.o_proj", "a.c.o_proj", "a.b.q_proj", "mlp.gate", "mlp.gate_proj", "lm_head")
        for scheme in [read.scheme_of(module)]
    }
    assert found == {
        "a.b.o_proj": "w4a16-g64", "a.c.o_proj": "w8a16", "a.b.q_proj": "w4a16-g32", "mlp.gate": None,
        "mlp.gate_proj": "w4a16-g32", "lm_head": None,
    }  # fmt: skip
    skip = read_quantization({"quantization_config": {**GPTQ, "dynamic": {r"-:.*\.layers\.0\..*": {}}}})
    assert skip is not None and skip.scheme_of("model.layers.0.x") is None and skip.scheme_of("model.layers.1.x")
    awq = read_quantization({"quantization_config": {**AWQ, "modules_to_not_convert": ["gate"]}})
    assert awq is not None and awq.scheme_of("layers.0.mlp.gate") is None and awq.scheme_of("layers.0.mlp.gate_proj")


@pytest.mark.parametrize(
    ("changes", "activations", "name"),
    [
        ({"num_bits": 8, "strategy": "channel"}, None, "w8a16"),
        ({"num_bits": 8, "strategy": "channel"}, {"type": "int", "num_bits": 8, "strategy": "token"}, "w8a8"),
        ({"num_bits": 8, "strategy": "tensor"}, None, "w8a16"),
        ({"num_bits": 4, "group_size": 64}, {"type": "float", "num_bits": 8, "strategy": "token"}, "w4a16-g64"),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, {"type": "float", "strategy": "token"}, "fp8"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, {"type": "float", "dynamic": False}, "fp8"),
        ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, None, "fp8-block"),
        ({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 256}, None, "fp8-g128"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None, "mxfp4"),
    ],
)
def test_which_format_a_group_is(changes: dict[str, Any], activations: dict[str, Any] | None, name: str) -> None:
    kind = changes.get("type", "int") + str(changes["num_bits"])
    layout = {"int8": "int-quantized", "int4": "pack-quantized", "float8": "float-quantized"}
    asked = {"symmetric": True, "dynamic": True, **activations} if activations else None
    tree = {
        "quant_method": "compressed-tensors",
        "format": layout.get(kind, "mxfp4-pack-quantized"),
        "config_groups": {"g": {"targets": ["Linear"], "weights": changes, "input_activations": asked}},
    }
    read = read_quantization({"quantization_config": tree})
    scheme = read.scheme_of("any") if read else None
    assert read is not None and scheme is not None and scheme.format.name == name
    assert read.unused == ((".input_scale",) if asked and not asked["dynamic"] else ())
