"""The contract of expert banks (kernels/bank.py), kept by every bank of the CPU, and which one the registry gives."""

from collections.abc import Callable

import pytest
import torch
from random_experts import bank_shape, fill, parts, random_call, random_expert, relative_error

from moe_runtime.kernels import registry
from moe_runtime.kernels.bank import BankShape, ExpertBank
from moe_runtime.kernels.linear import can_pack
from moe_runtime.kernels.native import library as native
from moe_runtime.kernels.native_bank import NativeBank
from moe_runtime.kernels.onednn_bank import OneDnnBank
from moe_runtime.kernels.plain_bank import PlainBank
from moe_runtime.kernels.workers import Workers
from moe_runtime.quant.formats import FORMATS, QUANTIZED

CPU = torch.device("cpu")
FLOATS = [name for name in FORMATS if name not in QUANTIZED]
MAKERS: dict[str, Callable[[BankShape], ExpertBank]] = {
    "plain": PlainBank,
    "onednn": lambda shape: OneDnnBank(shape, Workers(2)),
    "native": lambda shape: NativeBank(shape, threads=2),
}
CASES = [("plain", name) for name in FORMATS] + [("onednn", name) for name in FLOATS]
if native.usual_isa() >= 0:
    CASES += [("native", name) for name in FORMATS]
every_bank = pytest.mark.parametrize(("kind", "name"), CASES)
needs_native = pytest.mark.skipif(native.usual_isa() < 0, reason="the extension was not built")

# Of a bank against exact arithmetic with the same weights: oneDNN computes in the weights' dtype.
ERROR = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


@every_bank
def test_the_weighted_sum_of_experts(kind: str, name: str) -> None:
    bank, exact = MAKERS[kind](bank_shape(name)), PlainBank(bank_shape(name), dtype=torch.float64)
    fill(bank, exact)
    call = random_call(bank.shape, tokens=40, picks=3, seed=1)
    found_TH, expected_TH = call.of(bank), call.of(exact)
    assert found_TH.dtype == torch.float32
    assert relative_error(found_TH, expected_TH) < (ERROR.get(name, 1e-3) if kind != "plain" else 1e-5)


@every_bank
def test_fetch_gives_back_what_was_stored_bit_for_bit(kind: str, name: str) -> None:
    bank = MAKERS[kind](bank_shape(name, hidden=133, intermediate=35))
    fill(bank)
    replacement = random_expert(bank.shape, seed=77)
    bank.store(2, *replacement)
    for position in range(bank.shape.experts):
        expected = replacement if position == 2 else random_expert(bank.shape, position)
        for found, given in zip(bank.fetch(position), expected, strict=True):
            assert type(found) is type(given) and found.shape == given.shape
            for one, other in zip(parts(found), parts(given), strict=True):
                assert one.dtype == other.dtype and one.shape == other.shape
                assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@every_bank
def test_what_comes_out_is_a_copy_and_what_goes_in_is_copied(kind: str, name: str) -> None:
    bank = MAKERS[kind](bank_shape(name, experts=1))
    given = random_expert(bank.shape, 0)
    bank.store(0, *given)
    for weights in (given, bank.fetch(0)):
        for weight in weights:
            parts(weight)[0].view(torch.uint8).fill_(1)
    expected = random_expert(bank.shape, 0)
    for found, right in zip(bank.fetch(0), expected, strict=True):
        assert torch.equal(parts(found)[0].view(torch.uint8), parts(right)[0].view(torch.uint8))


@every_bank
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_x_may_be_of_a_narrower_dtype(kind: str, name: str, dtype: torch.dtype) -> None:
    bank, exact = MAKERS[kind](bank_shape(name)), PlainBank(bank_shape(name), dtype=torch.float64)
    fill(bank, exact)
    call = random_call(bank.shape, tokens=9, picks=2, seed=2, dtype=dtype)
    found_TH = call.of(bank)
    assert found_TH.dtype == dtype
    assert relative_error(found_TH, call.of(exact)) < 2e-2


@every_bank
def test_picks_that_are_elsewhere_and_no_tokens_at_all(kind: str, name: str) -> None:
    bank = MAKERS[kind](bank_shape(name))
    fill(bank)
    call = random_call(bank.shape, tokens=6, picks=2, seed=3)
    nowhere_TK = torch.full_like(call.slots_TK, -1)
    assert torch.equal(bank(call.x_TH, nowhere_TK, call.weights_TK), torch.zeros_like(call.x_TH))
    assert bank(call.x_TH[:0], call.slots_TK[:0], call.weights_TK[:0]).shape == (0, bank.shape.hidden)
    narrow = bank(call.x_TH, call.slots_TK.int(), call.weights_TK)
    assert torch.equal(narrow, call.of(bank))


@every_bank
def test_strided_inputs_and_routed_weights_of_other_dtypes(kind: str, name: str) -> None:
    bank = MAKERS[kind](bank_shape(name))
    fill(bank)
    call = random_call(bank.shape, tokens=8, picks=2, seed=4)
    expected_TH = call.of(bank)
    wide_TH = torch.zeros(8, 2 * bank.shape.hidden)
    wide_TH[:, ::2] = call.x_TH
    strided = [tensor.t().contiguous().t() for tensor in (call.slots_TK, call.weights_TK)]
    assert torch.equal(bank(wide_TH[:, ::2], *strided), expected_TH)
    assert relative_error(bank(call.x_TH, call.slots_TK, call.weights_TK.double()), expected_TH) < 1e-6


@every_bank
def test_bytes(kind: str, name: str) -> None:
    bank = MAKERS[kind](bank_shape(name, experts=2, hidden=256, intermediate=128))
    fill(bank)
    assert bank.nbytes == pytest.approx(bank.shape.nbytes, rel=0.05)


@every_bank
def test_what_does_not_fit_is_refused(kind: str, name: str) -> None:
    bank = MAKERS[kind](bank_shape(name))
    gate_up, down = random_expert(bank.shape, 0)
    other = random_expert(bank_shape("w4a16-g64" if name != "w4a16-g64" else "w8a16"), 0)
    for pair, field in (((down, down), "gate_up"), ((gate_up, gate_up), "down"), ((other[0], down), "gate_up")):
        with pytest.raises(ValueError, match=f"{field}: found"):
            bank.store(0, *pair)
    with pytest.raises(ValueError, match="position 1 holds no expert"):
        bank.fetch(1)


@needs_native
@pytest.mark.parametrize("name", FORMATS)
def test_the_registry_picks_by_device(name: str) -> None:
    assert type(registry.expert_bank(bank_shape(name), CPU, Workers(2))) is NativeBank
    assert type(registry.expert_bank(bank_shape(name), torch.device("meta"), Workers(1))) is PlainBank


@pytest.mark.parametrize("name", FORMATS)
def test_without_the_extension_others_serve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, "off")
    packed = not FORMATS[name].quantized and can_pack(torch.empty(1, 1, dtype=FORMATS[name].dtype))
    assert type(registry.expert_bank(bank_shape(name), CPU, Workers(1))) is (OneDnnBank if packed else PlainBank)


@needs_native
def test_linear_layers_with_and_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, "off")
    bank = PlainBank(bank_shape("w8a16"))
    weight_NK, _ = random_expert(bank.shape, 0)
    x_TK = torch.randn(3, bank.shape.hidden)
    plain_TN = registry.quantized_linear(weight_NK)(x_TK)
    monkeypatch.delenv(native.ENVIRONMENT)
    assert relative_error(registry.quantized_linear(weight_NK)(x_TK), plain_TN) < 1e-3


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, "avx1024")
    with pytest.raises(ValueError, match="MOE_RUNTIME_NATIVE is 'avx1024': this machine has"):
        registry.expert_bank(bank_shape("w8a16"), CPU, Workers(1))
