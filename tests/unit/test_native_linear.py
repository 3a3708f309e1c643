"""The C++ linear layer: every format against exact arithmetic, number by number, and at the ends of what codes can be.

Legend: T rows, N outputs, K inputs.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_experts import parts, relative_error
from torch import Tensor

from moe_runtime.kernels.bank import Weight
from moe_runtime.kernels.native import library as native
from moe_runtime.kernels.native_linear import NativeLinear
from moe_runtime.quant import fourbit
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import QuantizedTensor, dequantize

pytestmark = pytest.mark.skipif(native.usual_isa() < 0, reason="the extension was not built")
every_isa = pytest.mark.parametrize("isa", native.here())
LAYER_FORMATS = ["w8a16", "w4a16-g32", "w4a16-g64-zp", "w4a16-g128", "mxfp4", "fp8-block", "bfloat16"]


def random_weight(name: str, rows: int, columns: int, seed: int) -> Weight:
    weight_NK = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return quantize(weight_NK, FORMATS[name]) if FORMATS[name].quantized else weight_NK.to(FORMATS[name].dtype)


def exact(weight_NK: Weight) -> Tensor:
    return (dequantize(weight_NK) if isinstance(weight_NK, QuantizedTensor) else weight_NK).double()


def rounding_bound(x_TK: Tensor, weight_NK: Tensor, span: int, relative: float) -> Tensor:
    """How far a result may be off, [T, N]: each activation by 1/65534 of the largest of its span or by `relative` of
    itself, each sum by floats' rounding of its terms.
    """
    pad = -x_TK.shape[1] % span
    spans_TSG = torch.nn.functional.pad(x_TK.abs(), (0, pad)).unflatten(1, (-1, span))
    step_TK = spans_TSG.amax(2, keepdim=True).expand_as(spans_TSG).flatten(1)[:, : x_TK.shape[1]] / 65534
    terms = x_TK.shape[1] + 8
    return (step_TK + x_TK.abs() * (terms * 2**-24 + relative)) @ weight_NK.abs().T + 1e-30


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(LAYER_FORMATS),
    isa=st.sampled_from(native.here() or ("",)),
    rows=st.integers(0, 40),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 400),
    seed=st.integers(0, 99),
    spread=st.sampled_from([1.0, 100.0]),
)
def test_every_number_is_within_what_rounding_allows(
    name: str, isa: str, rows: int, outputs: int, inputs: int, seed: int, spread: float
) -> None:
    weight_NK = random_weight(name, outputs, inputs, seed)
    generator = torch.Generator().manual_seed(seed)
    x_TK = torch.randn(rows, inputs, generator=generator)
    x_TK[:, ::17] *= spread
    bias_N = torch.randn(outputs, generator=generator)
    y_TN = NativeLinear(weight_NK, bias_N, threads=2, isa=native.isa_named(isa))(x_TK)
    w_NK, span = exact(weight_NK), FORMATS[name].group[1] or 128
    error_TN = (y_TN.double() - (x_TK.double() @ w_NK.T + bias_N)).abs()
    relative = 2**-8 if (name, isa) == ("bfloat16", "avx512bf16") else 0
    bound_TN = rounding_bound(x_TK.double(), w_NK, span, relative) + bias_N.abs() * 2**-20
    assert bool((error_TN <= bound_TN).all())


@every_isa
@pytest.mark.parametrize("name", LAYER_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_alone_and_in_a_batch(isa: str, name: str, dtype: torch.dtype) -> None:
    layer = NativeLinear(random_weight(name, 150, 200, 1), torch.randn(150), threads=2, isa=native.isa_named(isa))
    x_TK = torch.randn(130, 200).to(dtype)
    together_TN = layer(x_TK)
    assert together_TN.dtype == dtype
    for rows in (slice(0, 1), slice(5, 9), slice(40, 61)):
        assert torch.equal(layer(x_TK[rows]), together_TN[rows])
    assert torch.equal(layer(x_TK.view(2, 65, 200)), together_TN.view(2, 65, 150))
    strided = torch.zeros(130, 400, dtype=dtype)
    strided[:, ::2] = x_TK
    assert torch.equal(layer(strided[:, ::2]), together_TN)


@every_isa
def test_int8_at_its_ends(isa: str) -> None:
    """-128 is a code that others' checkpoints have, and sums of the largest numbers must not overflow or saturate."""
    ends = torch.tensor([-128, 127, -127, 1], dtype=torch.int8)
    values_NK = ends.repeat_interleave(8)[torch.arange(32)][:, None].expand(32, 4096).contiguous()
    values_NK[1::2, 1::2] = 127
    scales = torch.full((32, 1), 0.5)
    for name in ("w8a16", "w8a8"):
        layer = NativeLinear(
            QuantizedTensor(FORMATS[name], 4096, values_NK, scales), threads=1, isa=native.isa_named(isa)
        )
        for signs_K in (torch.ones(4096), -torch.ones(4096), torch.tensor([1.0, -1.0]).repeat(2048)):
            x_TK = signs_K.expand(3, 4096) * 3
            torch.testing.assert_close(layer(x_TK), x_TK @ (values_NK.float() * 0.5).T, rtol=1e-5, atol=0.05)


@every_isa
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "w4a16-g32", "w4a16-g32-zp"])
def test_every_code_is_read_as_its_number(isa: str, name: str) -> None:
    """x picks one column a time, so that results are the weights; rows carry small and large scales."""
    form = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    if form.packed == 1:
        codes = torch.where(codes & 127 == 127, 0, codes).to(torch.uint8)  # the two that are no numbers
        values, scales = codes.view(form.dtype), torch.tensor([[2.0**-20], [3.0**9]])
    else:
        values = fourbit.pack(codes % 16)
        scales = torch.tensor([[0, 1, 127, 100], [254 - 40, 3, 140, 80]], dtype=torch.uint8)
        if name != "mxfp4":
            scales = torch.tensor([[2**-24, 1, 0.3, 65504], [2**-14, 7, 100, 0.1]], dtype=torch.float16)
    zeros = torch.tensor([[0, 15, 8, 3], [9, 1, 7, 14]], dtype=torch.uint8) if form.zero_points else None
    weight = QuantizedTensor(form, 128, values, scales, zeros)
    found_KN = NativeLinear(weight, isa=native.isa_named(isa), threads=1)(torch.eye(128))
    torch.testing.assert_close(found_KN.T, dequantize(weight), rtol=1e-6, atol=1e-40)


@pytest.mark.parametrize("name", FORMATS)
def test_the_weight_comes_back_bit_for_bit_and_takes_no_more_bytes_than_it_has(name: str) -> None:
    weight_NK = random_weight(name, 144, 256, 2)
    layer = NativeLinear(weight_NK)
    back = layer.weight()
    for found, given_part in zip(parts(back), parts(weight_NK), strict=True):
        assert torch.equal(found.view(torch.uint8), given_part.view(torch.uint8))
    assert layer.nbytes == pytest.approx(FORMATS[name].nbytes(144, 256), rel=0.05)


def test_odd_columns_of_four_bits_keep_what_pads_them() -> None:
    weight_NK = random_weight("w4a16-g32", 5, 33, 3)
    assert isinstance(weight_NK, QuantizedTensor)
    weight_NK.values[:, -1] |= 0xA0
    layer = NativeLinear(weight_NK)
    back = layer.weight()
    assert isinstance(back, QuantizedTensor) and torch.equal(back.values, weight_NK.values)
    x_TK = torch.randn(4, 33)
    assert relative_error(layer(x_TK), x_TK.double() @ exact(weight_NK).T) < 2e-4


def test_threads_follow_torch_where_none_are_given() -> None:
    layer, x_TK = NativeLinear(random_weight("w8a16", 100, 64, 4)), torch.randn(7, 64)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(layer(x_TK))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_what_does_not_fit_is_refused() -> None:
    weight_NK = random_weight("w8a16", 10, 64, 5)
    assert isinstance(weight_NK, QuantizedTensor)
    layer = NativeLinear(weight_NK)
    for x, message in (
        (torch.randn(2, 63), r"x is torch.float32 \[2, 63\]: expected floats \[..., 64\]"),
        (torch.randn(2, 64).double(), "x is torch.float64"),
        (torch.tensor(1.0), r"x is torch.float32 \[\]"),
        (torch.randn(2, 64, device="meta"), "x is on meta: expected the CPU"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x)
    with pytest.raises(ValueError, match=r"the bias has shape \[9\], expected \[10\]"):
        NativeLinear(weight_NK, torch.zeros(9))
    with pytest.raises(ValueError, match=r"a weight has shape \[2, 10, 64\]: expected \[outputs, inputs\]"):
        NativeLinear(torch.zeros(2, 10, 64))
    with pytest.raises(ValueError, match="a weight is float64: expected float32, bfloat16 or float16"):
        NativeLinear(torch.zeros(10, 64).double())
    with pytest.raises(ValueError, match=r"the scales of w8a16 are torch\.uint8: expected"):
        NativeLinear(QuantizedTensor(weight_NK.format, 64, weight_NK.values, weight_NK.scales_RC.to(torch.uint8)))
    with pytest.raises(ValueError, match="weight is not on the CPU"):
        NativeLinear(weight_NK.to(torch.device("meta")))
