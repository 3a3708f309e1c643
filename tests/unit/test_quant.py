"""Every weight format: what is stored, how near the way back comes, and that nothing depends on what lies beside it.

Legend: N outputs, K inputs, E experts.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from moe_runtime.errors import ConfigError
from moe_runtime.quant import fourbit
from moe_runtime.quant.formats import FORMATS, QUANTIZED, format_named
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import QuantizedTensor, concat_rows, dequantize, float_scales, row_groups, spread

# Root mean square of the error over that of normally distributed weights, measured and rounded up.
RELATIVE_ERROR = {
    "w8a16": 0.011, "w8a8": 0.011, "fp8": 0.027, "fp8-g128": 0.027, "fp8-block": 0.027, "mxfp4": 0.13,
    "w4a16-g32": 0.09, "w4a16-g64": 0.1, "w4a16-g128": 0.11,
    "w4a16-g32-zp": 0.08, "w4a16-g64-zp": 0.09, "w4a16-g128-zp": 0.1,
}  # fmt: skip


def weight(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_is_what_the_format_allows(name: str) -> None:
    w_NK = weight(1, 256, 512)
    back_NK = dequantize(quantize(w_NK, FORMATS[name]))
    error = float((back_NK - w_NK).norm() / w_NK.norm())
    assert RELATIVE_ERROR[name] / 2 < error < RELATIVE_ERROR[name]


@pytest.mark.parametrize("name", QUANTIZED)
def test_bytes_are_as_the_format_says(name: str) -> None:
    form = FORMATS[name]
    for rows, columns in ((256, 512), (130, 200), (7, 33)):
        assert quantize(weight(2, rows, columns), form).nbytes == form.nbytes(rows, columns)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(QUANTIZED),
    st.integers(1, 150),
    st.integers(1, 300),
    st.integers(0, 99),
    st.sampled_from([1e-3, 1, 50]),
)
def test_each_number_is_within_half_a_step(name: str, rows: int, columns: int, seed: int, size: float) -> None:
    """Where no clipping is chosen; four-bit formats may clip, which only their total error bounds."""
    w_NK = weight(seed, rows, columns) * size
    q = quantize(w_NK, FORMATS[name])
    assert q.shape == (rows, columns)
    error_NK = (dequantize(q) - w_NK).abs()
    scales_NK = spread(float_scales(q.scales_RC), q)
    match q.format.values:
        case "int8":
            assert bool((error_NK <= scales_NK * 0.5001).all())
        case "e4m3":
            assert bool((error_NK <= torch.maximum(w_NK.abs() / 16, scales_NK * 2**-10) * 1.001).all())
        case "e2m1":
            assert bool((error_NK <= torch.maximum(w_NK.abs() / 4, scales_NK / 4) * 1.34).all())
        case _:
            assert bool((error_NK <= scales_NK * (0.5001 if q.format.zero_points else 4)).float().mean() > 0.7)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantizing_what_was_quantized_changes_nothing(name: str) -> None:
    once = quantize(weight(3, 140, 260), FORMATS[name])
    again = dequantize(quantize(dequantize(once), FORMATS[name]))
    assert float((again - dequantize(once)).norm() / again.norm()) < (0.04 if FORMATS[name].packed == 2 else 1e-3)


@pytest.mark.parametrize("name", QUANTIZED)
def test_an_expert_of_a_stack_is_quantized_as_alone(name: str) -> None:
    w_ENK = weight(4, 3, 130, 96) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    stacked = quantize(w_ENK, FORMATS[name])
    for expert in range(3):
        alone = quantize(w_ENK[expert], FORMATS[name])
        assert all(torch.equal(part, alone.parts[key]) for key, part in stacked[expert].parts.items())
        assert torch.equal(dequantize(stacked)[expert], dequantize(alone))


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zero_and_huge_or_tiny_weights_stay_finite(name: str) -> None:
    w_NK = torch.zeros(128, 128)
    assert torch.equal(dequantize(quantize(w_NK, FORMATS[name])), w_NK)
    for size in (1e-12, 1e4):
        assert bool(dequantize(quantize(weight(5, 128, 128) * size, FORMATS[name])).isfinite().all())
    for bad in (float("nan"), float("inf")):
        w_NK[3, 5] = bad
        with pytest.raises(ValueError, match="not finite"):
            quantize(w_NK, FORMATS[name])


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_joined_are_the_rows_apart_or_refused(name: str) -> None:
    form = FORMATS[name]
    for upper in (128, 100):
        parts = [quantize(weight(6 + i, rows, 256), form) for i, rows in enumerate((upper, 60))]
        joined = concat_rows(*parts)
        if form.group[0] == 128 and upper % 128:
            assert joined is None
            joined = concat_rows(*(row_groups(part) for part in parts))
            assert joined is not None and torch.equal(dequantize(joined), torch.cat([dequantize(p) for p in parts]))
        else:
            assert joined is not None and torch.equal(
                dequantize(joined), torch.cat([dequantize(part) for part in parts])
            )


def test_fourbit_codes() -> None:
    codes_K = torch.arange(16, dtype=torch.uint8).repeat(3)[:33]
    assert torch.equal(fourbit.unpack(fourbit.pack(codes_K), 33), codes_K)
    numbers = fourbit.e2m1_values()
    assert torch.equal(fourbit.e2m1_values()[fourbit.e2m1_codes(numbers).int()], numbers)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.25, -5.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -4.0])
    assert torch.equal(numbers[fourbit.e2m1_codes(ties).int()], expected)


def test_what_does_not_fit_is_refused() -> None:
    q = quantize(weight(7, 64, 64), FORMATS["w4a16-g32"])
    with pytest.raises(ValueError, match="stored columns: found 32, expected 30"):
        QuantizedTensor(q.format, 60, q.values, q.scales_RC)
    with pytest.raises(ValueError, match=r"scales shape: found \(64, 1\)"):
        QuantizedTensor(q.format, 64, q.values, q.scales_RC[:, :1])
    with pytest.raises(ValueError, match="zero points"):
        QuantizedTensor(q.format, 64, q.values, q.scales_RC, q.scales_RC.to(torch.uint8))
    with pytest.raises(ConfigError, match=r"model.quant is 'w8a61': .*did you mean w8a16"):
        format_named("w8a61", "model.quant")
