"""A bank gives back what it got, refuses what does not fit, and never asks the device for a number."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.kernels.bank import BankShape, Weight
from moe_runtime.kernels.triton.bank import TritonBank
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.tensor import QuantizedTensor
from tests.interpreted.reference import CPU, bank_of, check, expected, random_experts

READS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_to_copy"}


class NoReads(TorchDispatchMode):
    """Fails at any operation that has to wait for a number from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func.overloadpacket.__name__ not in READS, f"{func} reads from the device"
        return func(*args, **(kwargs or {}))


def same(one: Weight, other: Weight) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    parts = zip(one.parts.values(), other.parts.values(), strict=True)
    return one.format == other.format and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in parts)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 48), (37, 19)])
def test_what_is_stored_comes_back_and_nothing_else_changes(name: str, hidden: int, intermediate: int) -> None:
    torch.manual_seed(0)
    experts = random_experts(name, 4, hidden, intermediate)
    bank = bank_of(name, experts[:3])
    bank.store(1, *experts[3])
    for position, expert in ((0, experts[0]), (1, experts[3]), (2, experts[2])):
        assert all(same(*pair) for pair in zip(bank.fetch(position), expert, strict=True))
    fetched = bank.fetch(2)[1]
    (fetched if isinstance(fetched, Tensor) else fetched.values).view(torch.uint8).fill_(1)
    assert same(bank.fetch(2)[1], experts[2][1]), "fetch gives a copy"


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_format(name: str) -> None:
    shape = BankShape(3, 512, 256, FORMATS[name])
    assert TritonBank(shape, CPU).nbytes == shape.nbytes
    odd = BankShape(3, 500, 250, FORMATS[name])
    assert odd.nbytes <= TritonBank(odd, CPU).nbytes < 1.07 * odd.nbytes


def test_scales_wider_than_the_format_says_are_kept() -> None:
    """As some checkpoints have them; the experts before and after stay as they were."""
    torch.manual_seed(1)
    experts = random_experts("w4a16-g32", 3, 64, 32)
    wide = tuple(
        dataclasses.replace(weight, scales_RC=weight.scales_RC.float() * 1.0001)
        for weight in experts[1]
        if isinstance(weight, QuantizedTensor)
    )
    experts[1] = (wide[0], wide[1])
    bank = bank_of("w4a16-g32", experts)
    for position, expert in enumerate(experts):
        assert all(same(*pair) for pair in zip(bank.fetch(position), expert, strict=True))
    x_TH, slots_TK, weights_TK = torch.randn(4, 64), torch.randint(0, 3, (4, 2)), torch.rand(4, 2)
    check(bank(x_TH, slots_TK, weights_TK), expected(x_TH, slots_TK, weights_TK, experts), 5e-7)


def test_what_does_not_fit_is_refused() -> None:
    bank = TritonBank(BankShape(2, 64, 32, FORMATS["w8a16"]), CPU)
    good, other = random_experts("w8a16", 1, 64, 32)[0], random_experts("fp8", 1, 64, 32)[0]
    with pytest.raises(ValueError, match="gate_up of expert 1: the weight's format is fp8, expected w8a16"):
        bank.store(1, other[0], good[1])
    with pytest.raises(ValueError, match=r"down of expert 0: the weight has shape \[64, 64\], expected \[64, 32\]"):
        bank.store(0, good[0], good[0])
    with pytest.raises(ValueError, match=r"format is torch\.float32, expected w8a16"):
        bank.store(0, torch.zeros(64, 64), good[1])


@pytest.mark.parametrize("name", ["bfloat16", "w8a8", "w4a16-g32-zp", "mxfp4"])
def test_a_call_reads_nothing_from_the_device(name: str) -> None:
    torch.manual_seed(2)
    bank = bank_of(name, random_experts(name, 3, 64, 32))
    x_TH, slots_TK, weights_TK = torch.randn(5, 64).bfloat16(), torch.randint(-1, 3, (5, 2)), torch.rand(5, 2)
    with NoReads():
        y_TH = bank(x_TH, slots_TK, weights_TK)
    assert torch.equal(y_TH, bank(x_TH, slots_TK, weights_TK))


@pytest.mark.parametrize("name", ["bfloat16", "w8a8", "mxfp4"])
def test_a_call_works_where_tensors_have_no_numbers(name: str) -> None:
    with FakeTensorMode():
        bank = TritonBank(BankShape(3, 64, 32, FORMATS[name]), CPU)
        x_TH = torch.empty(5, 64, dtype=torch.bfloat16)
        y_TH = bank(x_TH, torch.empty(5, 2, dtype=torch.int64), torch.empty(5, 2))
    assert y_TH.shape == x_TH.shape and y_TH.dtype == x_TH.dtype
