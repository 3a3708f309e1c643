"""Every published layout against its well-kept library, or where there is none that runs here against its definition.

Legend: N outputs, K inputs, C groups, E experts, I intermediate.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter, FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationConfig
from published import packed_rows
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_runtime.quant.checkpoints.awq import Awq
from moe_runtime.quant.checkpoints.gptq import Gptq
from moe_runtime.quant.checkpoints.mxfp4 import FusedBlocks
from moe_runtime.quant.checkpoints.plain_numbers import PlainNumbers
from moe_runtime.quant.checkpoints.read import read_quantization
from moe_runtime.quant.checkpoints.scheme import PartError, Scheme
from moe_runtime.quant.checkpoints.written import WrittenGroup, quantization_config, scheme_for
from moe_runtime.quant.formats import FORMATS, QUANTIZED
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import QuantizedTensor, dequantize

N, K = 72, 256


def weight(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def fits(scheme: Scheme, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
    """The tensors are those that the scheme names."""
    expected = scheme.parts(shape)
    assert set(parts) <= set(expected)
    for suffix, part in expected.items():
        if suffix in parts:
            assert tuple(parts[suffix].shape) in part.shapes, suffix
        else:
            assert part.optional, suffix


def same(left: QuantizedTensor, right: QuantizedTensor) -> None:
    assert left.format == right.format and left.columns == right.columns
    for name, part in left.parts.items():
        assert part.dtype == right.parts[name].dtype
        assert torch.equal(part.contiguous().view(torch.uint8), right.parts[name].contiguous().view(torch.uint8))


def library_scheme(name: str) -> tuple[Any, Any]:
    """(compressor, scheme) that compressed-tensors itself makes of the configuration that is written for a format."""
    config = quantization_config({"group_0": WrittenGroup(FORMATS[name], ["Linear"])}, [])
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(scheme.format), scheme


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_library_reads_what_is_written(name: str) -> None:
    q = quantize(weight(1, N, K), FORMATS[name])
    parts = scheme_for(q.format).pack(q)
    compressor, scheme = library_scheme(name)
    wide = dict(parts)
    if q.scales_RC.dtype == torch.float16:
        wide[".weight_scale"] = q.scales_RC.float()  # the library multiplies in the dtype of the scales
    local = {suffix.removeprefix("."): part for suffix, part in wide.items()}
    back_NK = compressor.decompress(local, scheme)["weight"].float()
    torch.testing.assert_close(back_NK, dequantize(q), rtol=0, atol=0)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("rows", "columns"), [(N, K), (73, 200), (3, 33), (64, 32), (8, 256)])
def test_what_is_written_reads_back(name: str, rows: int, columns: int) -> None:
    q = quantize(weight(2, rows, columns), FORMATS[name])
    scheme, parts = scheme_for(q.format), scheme_for(q.format).pack(q)
    fits(scheme, parts, (rows, columns))
    same(scheme.unpack(parts, rows, columns), q)
    read = read_quantization(
        {"quantization_config": quantization_config({"a": WrittenGroup(q.format, ["Linear"])}, ["lm_head"])}
    )
    assert read is not None and read.scheme_of("model.layers.0.mlp.up_proj") == scheme
    assert read.scheme_of("lm_head") is None


@pytest.mark.parametrize("name", ["w8a16", "w8a8", "w4a16-g32", "w4a16-g128-zp", "fp8", "fp8-block", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_the_library_writes_is_read(name: str, dtype: torch.dtype) -> None:
    """Scales and zero points are drawn, not found: the library's packing is under test, and bf16 scales stay exact."""
    compressor, scheme = library_scheme(name)
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(3)
    scales_RC = (torch.rand(form.groups(N, K), generator=generator) + 0.5).to(dtype) * 0.01
    if name == "mxfp4":
        scales_RC = torch.exp2(torch.randint(-9, -5, form.groups(N, K), generator=generator)).to(dtype)
    zeros_RC = torch.randint(-8, 8, scales_RC.shape, generator=generator, dtype=torch.int8)
    local = {"weight": weight(4, N, K), "weight_scale": scales_RC}
    if form.zero_points:
        local["weight_zero_point"] = zeros_RC
    written = compressor.compress(local, scheme)
    parts = {f".{key}": part for key, part in written.items()}
    own = scheme_for(form)
    fits(own, parts, (N, K))
    q = own.unpack(parts, N, K)
    exact = dict(written)
    if name != "mxfp4":
        exact["weight_scale"] = scales_RC.float()
    assert torch.equal(dequantize(q), compressor.decompress(exact, scheme)["weight"].float())
    assert q.format.scales == q.scales_RC.dtype


@pytest.mark.parametrize("tensor_shape", [(), (1,), (1, 1)])
def test_one_scale_per_tensor_becomes_one_per_row(tensor_shape: tuple[int, ...]) -> None:
    q = quantize(weight(5, N, K), FORMATS["fp8"])
    scheme = PlainNumbers("float-quantized", FORMATS["fp8"], per_tensor=True)
    parts = {".weight": q.values, ".weight_scale": torch.full(tensor_shape, 0.125, dtype=torch.bfloat16)}
    fits(scheme, parts, (N, K))
    assert torch.equal(dequantize(scheme.unpack(parts, N, K)), q.values.float() * 0.125)


def test_a_large_group_becomes_several() -> None:
    """int4 in groups of 256 and per row, by the library, and what does not divide."""
    for strategy, size in (("group", 256), ("channel", None)):
        config = quantization_config({"a": WrittenGroup(FORMATS["w4a16-g128-zp"], ["Linear"])}, [])
        config["config_groups"]["a"]["weights"] |= {"strategy": strategy, "group_size": size}
        read = read_quantization({"quantization_config": config})
        scheme = QuantizationConfig.model_validate(config).config_groups["a"]
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        groups = 2 if size else 1
        scales_NC = torch.rand(N, groups, generator=torch.Generator().manual_seed(6)) + 0.5
        zeros_NC = torch.arange(N * groups).reshape(N, groups).remainder(16).sub(8).to(torch.int8)
        local = {"weight": weight(7, N, 512) * 100, "weight_scale": scales_NC, "weight_zero_point": zeros_NC}
        written = compressor.compress(local, scheme)
        own = read.scheme_of("x") if read else None
        assert own is not None and own.format.name == "w4a16-g128-zp"
        parts = {f".{key}": part for key, part in written.items()}
        fits(own, parts, (N, 512))
        back_NK = dequantize(own.unpack(parts, N, 512))
        assert torch.equal(back_NK, compressor.decompress(written, scheme)["weight"])


def test_awq_is_read_as_the_library_converts_it() -> None:
    generator = torch.Generator().manual_seed(8)
    words = {
        name: torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        for name, shape in (("qweight", (K, N // 8)), ("qzeros", (K // 64, N // 8)))
    }
    scales_CN = torch.rand(K // 64, N, generator=generator) + 0.5
    stored = {f"x.{name}": part for name, part in {**words, "scales": scales_CN}.items()}
    converter = AutoAWQConverter(group_size=64)
    converted = converter.process(dict(stored))
    config = converter.update_config(None)
    assert config is not None
    scheme = config.config_groups["config_group_0"]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    expected_NK = compressor.decompress({k.removeprefix("x."): v for k, v in converted.items()}, scheme)["weight"]
    own = Awq(FORMATS["w4a16-g64-zp"], 64)
    parts = {name.removeprefix("x"): part for name, part in stored.items()}
    fits(own, parts, (N, K))
    assert torch.equal(dequantize(own.unpack(parts, N, K)), expected_NK)


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 64, False), (4, 128, True), (4, -1, False), (8, -1, True)]
)
def test_gptq_by_its_definition(kind: str, bits: int, group: int, symmetric: bool) -> None:
    """weight = scale * (code - zero), where zero is stored less one (modulo its bits) in the first version."""
    random = np.random.default_rng(9)
    size, top = K if group == -1 else group, 2**bits
    codes_KN = random.integers(0, top, (K, N))
    zeros_CN = np.full((K // size, N), top // 2) if symmetric else random.integers(0, top, (K // size, N))
    scales_CN = random.random((K // size, N), dtype=np.float32) + 0.5
    expected_NK = ((codes_KN - zeros_CN.repeat(size, axis=0)) * scales_CN.repeat(size, axis=0)).T
    stored_CN = zeros_CN if kind == "gptq_v2" else (zeros_CN - 1) % top
    parts = {
        ".qweight": packed_rows(codes_KN, bits),
        ".qzeros": packed_rows(stored_CN.T, bits).T.contiguous(),
        ".scales": torch.from_numpy(scales_CN),
        ".g_idx": torch.arange(K, dtype=torch.int32) // size,
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "checkpoint_format": kind}
    read = read_quantization({"quantization_config": {**config, "desc_act": True, "damp_percent": 0.1}})
    scheme = read.scheme_of("x") if read else None
    assert scheme is not None
    fits(scheme, parts, (N, K))
    assert np.array_equal(dequantize(scheme.unpack(parts, N, K)).numpy(), expected_NK.astype(np.float32))
    without = {suffix: part for suffix, part in parts.items() if suffix != ".g_idx"}
    assert torch.equal(scheme.unpack(without, N, K).values, scheme.unpack(parts, N, K).values)
    parts[".g_idx"] = parts[".g_idx"].flip(0) if group != -1 else parts[".g_idx"] + 1
    with pytest.raises(PartError, match="desc_act"):
        scheme.unpack(parts, N, K)


def test_gptq_symmetric_zero_points_must_be_the_middle() -> None:
    scheme = Gptq(FORMATS["w4a16-g64"], 64, zero_offset=1)
    zeros_NC = np.full((N, K // 64), 7)
    zeros_NC[5, 2] = 6
    parts = {
        ".qweight": torch.zeros(K // 8, N, dtype=torch.int32),
        ".qzeros": packed_rows(zeros_NC, 4).T.contiguous(),
        ".scales": torch.ones(K // 64, N),
    }
    with pytest.raises(PartError, match="zero point 7: expected 8, since sym is true") as error:
        scheme.unpack(parts, N, K)
    assert error.value.suffix == ".qzeros"


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (200, 300)])
def test_deepseek_blocks_are_read_as_the_library_dequantizes_them(rows: int, columns: int) -> None:
    q = quantize(weight(10, rows, columns), FORMATS["fp8-block"])
    stored = {"x.weight": q.values, "x.weight_scale_inv": q.scales_RC}
    expected = FP8BlockDequantizer(weight_block_size=(128, 128), dtype=torch.float32).process(dict(stored))["x.weight"]
    read = read_quantization(
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
    )
    scheme = read.scheme_of("x") if read else None
    assert scheme is not None
    parts = {name.removeprefix("x"): part for name, part in stored.items()}
    fits(scheme, parts, (rows, columns))
    assert torch.equal(dequantize(scheme.unpack(parts, rows, columns)), expected)


def test_gpt_oss_blocks_are_read_as_transformers_dequantizes_them() -> None:
    experts, intermediate, hidden = 3, 40, 96
    generator = torch.Generator().manual_seed(11)
    blocks = torch.randint(0, 256, (experts, 2 * intermediate, hidden // 32, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(120, 130, blocks.shape[:-1], generator=generator).to(torch.uint8)
    plain_EHR = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # input first, gate and up alternating
    for interleaved in (False, True):
        scheme = FusedBlocks(interleaved=interleaved)
        fits(scheme, {"_blocks": blocks, "_scales": scales}, (experts, 2 * intermediate, hidden))
        for expert in range(experts):
            rows_RH = plain_EHR[expert].T
            expected_RH = torch.cat((rows_RH[0::2], rows_RH[1::2])) if interleaved else rows_RH
            own = scheme.unpack({"_blocks": blocks[expert], "_scales": scales[expert]}, 2 * intermediate, hidden)
            assert torch.equal(dequantize(own), expected_RH)
