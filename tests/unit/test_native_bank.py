"""The C++ experts, each instruction set of this machine, against exact arithmetic with the same weights."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_experts import bank_shape, fill, random_call, random_expert, relative_error

from moe_runtime.kernels.native import library as native
from moe_runtime.kernels.native_bank import NativeBank
from moe_runtime.kernels.plain_bank import PlainBank
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(native.usual_isa() < 0, reason="the extension was not built")
every_isa = pytest.mark.parametrize("isa", native.here())


def tolerance(name: str, isa: str, dtype: torch.dtype = torch.float32) -> float:
    """Relative error of a call: int16 activations are off by at most 1/65534 of the largest of their group, which of
    normally distributed numbers is three to four of their root mean square, and two products follow one another.
    """
    if dtype == torch.bfloat16 or (name, isa) == ("bfloat16", "avx512bf16"):
        return 2**-7
    return {"float": 1e-5, "e4m3": 1e-5}.get(FORMATS[name].values, 5e-3 if name == "w8a8" else 2e-4)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(list(FORMATS)),
    isa=st.sampled_from(native.here() or ("",)),
    hidden=st.integers(1, 300),
    intermediate=st.integers(1, 200),
    experts=st.integers(1, 4),
    tokens=st.integers(0, 40),
    picks=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    name: str,
    isa: str,
    hidden: int,
    intermediate: int,
    experts: int,
    tokens: int,
    picks: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    shape = bank_shape(name, experts, hidden, intermediate)
    bank, exact = NativeBank(shape, threads=2, isa=native.isa_named(isa)), PlainBank(shape, dtype=torch.float64)
    fill(bank, exact)
    call = random_call(shape, tokens, picks, seed, dtype)
    # A single number has no others to average its error with.
    allowed = tolerance(name, isa, dtype) * (1 if min(hidden, intermediate) > 8 else 8)
    assert relative_error(call.of(bank), call.of(exact)) < allowed


@every_isa
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 13, 100])
def test_a_token_alone_and_in_a_batch(isa: str, name: str, tokens: int) -> None:
    """Bit for bit, whatever the number of rows chooses: direct or tiled weights, the width of panels, the threads."""
    bank = NativeBank(bank_shape(name, experts=3), threads=2, isa=native.isa_named(isa))
    fill(bank)
    call = random_call(bank.shape, tokens, picks=2, seed=5)
    together_TH = call.of(bank)
    alone = NativeBank(bank.shape, threads=1, isa=native.isa_named(isa))
    fill(alone)
    for token in range(0, tokens, 7):
        rows = slice(token, token + 1)
        assert torch.equal(call[rows].of(alone), together_TH[rows])
    assert torch.equal(call.of(alone), together_TH)


@every_isa
@pytest.mark.parametrize("name", ["w8a16", "w4a16-g32-zp", "w8a8", "bfloat16"])
def test_many_rows_of_one_expert(isa: str, name: str) -> None:
    """More rows than a strip and a call's scratch memory hold."""
    shape = bank_shape(name, experts=2, hidden=40, intermediate=24)
    bank, exact = NativeBank(shape, threads=3, isa=native.isa_named(isa)), PlainBank(shape, dtype=torch.float64)
    fill(bank, exact)
    call = random_call(shape, tokens=700, picks=1, seed=6)
    call = replace(call, slots_TK=torch.where(call.slots_TK == 1, 0, call.slots_TK))
    assert relative_error(call.of(bank), call.of(exact)) < tolerance(name, isa)


@pytest.mark.parametrize("isa", [name for name in native.here() if name != "portable"])
@pytest.mark.parametrize("name", FORMATS)
def test_all_instruction_sets_agree(isa: str, name: str) -> None:
    banks = [NativeBank(bank_shape(name), isa=native.isa_named(each)) for each in (isa, "portable")]
    fill(*banks)
    call = random_call(banks[0].shape, tokens=30, picks=2, seed=7)
    allowed = {"w8a8": 5e-3, "bfloat16": tolerance(name, isa)}.get(name, 1e-5)
    assert relative_error(call.of(banks[0]), call.of(banks[1])) < allowed


@every_isa
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["w8a16", "w8a8", "mxfp4", "fp8", "bfloat16"])
def test_a_token_that_is_not_finite_harms_no_other(isa: str, name: str, bad: float) -> None:
    bank = NativeBank(bank_shape(name), threads=2, isa=native.isa_named(isa))
    fill(bank)
    call = random_call(bank.shape, tokens=20, picks=2, seed=8)
    call.slots_TK[3, 0] = 0
    expected_TH = call.of(bank)
    call.x_TH[3, 60] = bad
    found_TH = call.of(bank)
    assert not bool(found_TH[3].isfinite().any())
    others = torch.arange(20) != 3
    assert torch.equal(found_TH[others], expected_TH[others])


def test_tokens_of_zeros_and_of_tiny_and_huge_numbers() -> None:
    for name in FORMATS:
        bank, exact = NativeBank(bank_shape(name)), PlainBank(bank_shape(name), dtype=torch.float64)
        fill(bank, exact)
        call = random_call(bank.shape, tokens=8, picks=2, seed=9)
        call.x_TH[0] = 0
        call.x_TH[1] *= 1e-25
        call.x_TH[2] *= 1e12
        found_TH, expected_TH = call.of(bank), call.of(exact)
        assert torch.equal(found_TH[0], torch.zeros(bank.shape.hidden))
        assert bool(found_TH.isfinite().all())
        assert relative_error(found_TH[2], expected_TH[2]) < tolerance(name, native.here()[0])


def test_scales_may_be_wider_than_the_format_asks_for() -> None:
    shape = bank_shape("w4a16-g64", experts=1)
    narrow, wide = NativeBank(shape), NativeBank(shape)
    gate_up, down = random_expert(shape, 0)
    assert isinstance(gate_up, QuantizedTensor) and isinstance(down, QuantizedTensor)
    narrow.store(0, gate_up, down)
    widened = [replace(weight, scales_RC=weight.scales_RC.float()) for weight in (gate_up, down)]
    wide.store(0, *widened)
    call = random_call(shape, tokens=5, picks=1, seed=10)
    assert torch.equal(call.of(narrow), call.of(wide))
    fetched, _ = wide.fetch(0)
    assert isinstance(fetched, QuantizedTensor) and fetched.scales_RC.dtype == torch.float32
    with pytest.raises(ValueError, match=r"gate_up: found .*float16 scales, expected .*float32 scales"):
        wide.store(0, gate_up, down)


def test_weights_that_are_not_finite_are_refused() -> None:
    for name, part in (("fp8", "values"), ("mxfp4", "scales")):
        bank = NativeBank(bank_shape(name))
        gate_up, down = random_expert(bank.shape, 0)
        assert isinstance(down, QuantizedTensor)
        down.parts[part].view(torch.uint8)[3, 1] = 255
        with pytest.raises(ValueError, match="down: the weight has numbers that are not finite"):
            bank.store(0, gate_up, down)


def test_calls_that_do_not_fit_are_refused() -> None:
    bank = NativeBank(bank_shape("w8a16"))
    x_TH, slots_TK, weights_TK = torch.randn(3, 100), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    with pytest.raises(ValueError, match="position 2 holds no expert"):
        bank(x_TH, slots_TK + 2, weights_TK)
    fill(bank)
    for x, slots, weights, message in (
        (x_TH[:, 1:], slots_TK, weights_TK, r"x is torch.float32 \[3, 99\]: expected floats \[tokens, 100\]"),
        (x_TH[0], slots_TK, weights_TK, r"x is torch.float32 \[100\]"),
        (x_TH.double(), slots_TK, weights_TK, "x is torch.float64"),
        (x_TH[:2], slots_TK, weights_TK, r"slots are torch.int64 \[3, 2\]: expected integers \[2, picks\]"),
        (x_TH, slots_TK.float(), weights_TK, "slots are torch.float32"),
        (x_TH, slots_TK.short(), weights_TK, "slots are torch.int16"),
        (x_TH, slots_TK, weights_TK[:, :1], r"weights are torch.float32 \[3, 1\]: expected floats \[3, 2\]"),
        (x_TH, slots_TK, slots_TK, "weights are torch.int64"),
        (x_TH, slots_TK + 4, weights_TK, "slot 4 of a bank of 4 experts"),
        (x_TH, slots_TK - 2, weights_TK, "slot -2 of a bank of 4 experts"),
        (x_TH, slots_TK + 2**40, weights_TK, f"slot {2**40} of a bank of 4 experts"),
        (x_TH.to("meta"), slots_TK, weights_TK, "x is on meta: expected the CPU"),
    ):
        with pytest.raises(ValueError, match=message):
            bank(x, slots, weights)
    with pytest.raises(ValueError, match="position 4 of a bank of 4 experts"):
        bank.store(4, *random_expert(bank.shape, 0))
    with pytest.raises(ValueError, match="threads is 0"):
        NativeBank(bank.shape, threads=0)
    with pytest.raises(ValueError, match="beyond the native kernels"):
        NativeBank(bank_shape("w8a16", hidden=70000))
