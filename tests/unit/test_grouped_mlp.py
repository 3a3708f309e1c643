"""The grouped expert MLP against its plain twin, packed and not, and that packed rows do not depend on their batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.kernels.grouped_mlp import ExpertBank, grouped_mlp, grouped_mlp_reference
from moe_runtime.kernels.linear import can_pack, linear, pack

EXPERTS, HIDDEN, INTERMEDIATE = 6, 40, 24
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}

needs_packing = pytest.mark.skipif(not can_pack(torch.empty(1, 1)), reason="this torch build cannot pack weights")


def random_bank(dtype: torch.dtype = torch.float32) -> ExpertBank:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) * INTERMEDIATE**-0.5
    return ExpertBank(gate_up.to(dtype), down.to(dtype))


def random_picks(tokens: int, picks: int, seed: int, lowest: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, HIDDEN, generator=generator)
    slots_TK = torch.randint(lowest, EXPERTS, (tokens, picks), generator=generator)
    return x_TH, slots_TK, torch.rand(tokens, picks, generator=generator)


@given(tokens=st.integers(0, 90), picks=st.integers(1, 4), seed=st.integers(0, 10**6), packed=st.booleans())
@settings(max_examples=60, deadline=None)
def test_equals_one_pick_at_a_time(tokens: int, picks: int, seed: int, packed: bool) -> None:
    bank = random_bank()
    x_TH, slots_TK, weights_TK = random_picks(tokens, picks, seed)
    y_TH = grouped_mlp(x_TH, slots_TK, weights_TK, bank.packed() if packed else bank)
    torch.testing.assert_close(y_TH, grouped_mlp_reference(x_TH, slots_TK, weights_TK, bank), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dtypes(dtype: torch.dtype) -> None:
    bank = random_bank(dtype)
    x_TH, slots_TK, weights_TK = random_picks(30, 3, seed=2)
    y_TH = grouped_mlp(x_TH.to(dtype), slots_TK, weights_TK, bank.packed())
    assert y_TH.dtype == dtype
    exact_TH = grouped_mlp_reference(x_TH, slots_TK, weights_TK, random_bank())
    assert (y_TH.float() - exact_TH).abs().max() < TOLERANCE[dtype] * exact_TH.abs().max()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_int32_slots_and_picks_that_are_elsewhere(slot_dtype: torch.dtype) -> None:
    bank = random_bank().packed()
    x_TH, slots_TK, weights_TK = random_picks(5, 2, seed=3, lowest=0)
    nowhere_TK = torch.full_like(slots_TK, -1)
    assert torch.equal(grouped_mlp(x_TH, nowhere_TK.to(slot_dtype), weights_TK, bank), torch.zeros_like(x_TH))
    half_TK = torch.stack((slots_TK[:, 0], nowhere_TK[:, 0]), dim=1)
    only_TK = slots_TK[:, :1]
    both = [
        grouped_mlp(x_TH, half_TK.to(slot_dtype), weights_TK, bank),
        grouped_mlp(x_TH, only_TK, weights_TK[:, :1], bank),
    ]
    assert torch.equal(*both)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_row_is_the_same_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    bank = random_bank(dtype).packed()
    x_TH, slots_TK, weights_TK = random_picks(200, 3, seed=4)
    x_TH = x_TH.to(dtype)
    together_TH = grouped_mlp(x_TH, slots_TK, weights_TK, bank)
    for rows in (slice(0, 1), slice(7, 9), slice(90, 157)):
        assert torch.equal(grouped_mlp(x_TH[rows], slots_TK[rows], weights_TK[rows], bank), together_TH[rows])


@needs_packing
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 200])
def test_packed_linear(rows: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight_NK, bias_N = torch.randn(33, 40, generator=generator), torch.randn(33, generator=generator)
    x_TK = torch.randn(rows, 80, generator=generator)[:, ::2]
    packed_NK = pack(weight_NK)
    assert packed_NK.is_mkldnn and torch.equal(packed_NK.to_dense(), weight_NK) and pack(packed_NK) is packed_NK
    torch.testing.assert_close(linear(x_TK, packed_NK, bias_N), linear(x_TK, weight_NK, bias_N), rtol=0, atol=1e-4)
    torch.testing.assert_close(linear(x_TK, packed_NK), linear(x_TK, weight_NK), rtol=0, atol=1e-4)


def test_what_cannot_be_packed_stays_plain() -> None:
    for dtype in (torch.float16, torch.float64):
        weight = torch.ones(4, 4, dtype=dtype)
        assert pack(weight) is weight


def test_bank_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match=r"down has shape \[2, 4, 8\]: gate_up asks for \[2, 4, 3\]"):
        ExpertBank(torch.zeros(2, 6, 4), torch.zeros(2, 4, 8))


def test_nbytes_counts_both_matrices_packed_or_not() -> None:
    bank = random_bank(torch.bfloat16)
    assert bank.nbytes == bank.packed().nbytes == 2 * EXPERTS * 3 * INTERMEDIATE * HIDDEN
