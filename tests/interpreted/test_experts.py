"""The expert kernels of every format against plain torch in float64. Legend: see reference.py."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moe_runtime.kernels.triton.experts import round_to_int8
from moe_runtime.kernels.triton.linear import TritonLinear
from moe_runtime.kernels.triton.tiles import Tile
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.tensor import QuantizedTensor
from tests.interpreted.reference import (
    ROUNDED_TOLERANCE,
    TOLERANCE,
    bank_of,
    check,
    expected,
    plain,
    random_experts,
    stored,
)


def tolerance_of(name: str, dtype: torch.dtype) -> float:
    return ROUNDED_TOLERANCE if FORMATS[name].activations == "int8" else TOLERANCE[dtype]


def run(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], tile: Tile, seed: int, lowest: int = -1
) -> None:
    """sizes: tokens, picks, experts, hidden, intermediate."""
    tokens, picks, count, hidden, intermediate = sizes
    torch.manual_seed(seed)
    experts = random_experts(name, count, hidden, intermediate)
    x_TH = torch.randn(tokens, hidden).to(dtype)
    slots_TK, weights_TK = torch.randint(lowest, count, (tokens, picks)), torch.rand(tokens, picks)
    y_TH = bank_of(name, experts, (tile, tile))(x_TH, slots_TK, weights_TK)
    assert y_TH.dtype == dtype
    check(y_TH, expected(x_TH, slots_TK, weights_TK, experts), tolerance_of(name, dtype))


@settings(max_examples=50, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.sampled_from(list(FORMATS)),
    st.sampled_from(list(TOLERANCE)),
    st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 150), st.integers(1, 70)),
    st.sampled_from([Tile(16, 32, 32, 4, 1), Tile(16, 16, 64, 4, 1, True), Tile(32, 32, 128, 4, 1)]),
    st.integers(0, 99),
)
def test_any_experts(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], tile: Tile, seed: int
) -> None:
    """Tails in every direction, experts without tokens, picks that are elsewhere, no tokens, steps across groups."""
    run(name, dtype, sizes, tile, seed)


@pytest.mark.parametrize("block_k", [32, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_with_steps_inside_and_across_groups(name: str, block_k: int) -> None:
    """K ends inside a step and inside a group; rows end inside a block of scales."""
    run(name, torch.float32, (5, 2, 2, 2 * 128 + 40, 136), Tile(16, 64, block_k, 4, 1), seed=1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_float16(name: str) -> None:
    """float16 has other bit patterns than bfloat16, which float32 borrows."""
    run(name, torch.float16, (4, 2, 2, 160, 64), Tile(16, 32, 32, 4, 1), seed=2)


@pytest.mark.parametrize("name", ["bfloat16", "w4a16-g64", "fp8", "mxfp4"])
def test_many_blocks_of_an_expert(name: str) -> None:
    """More rows than a block, more blocks than a band, and only one expert of three has any."""
    torch.manual_seed(3)
    experts = random_experts(name, 3, 48, 32)
    x_TH, weights_TK = torch.randn(200, 48), torch.rand(200, 1)
    slots_TK = torch.full((200, 1), 1)
    y_TH = bank_of(name, experts, (Tile(16, 32, 32, 4, 1),) * 2)(x_TH, slots_TK, weights_TK)
    check(y_TH, expected(x_TH, slots_TK, weights_TK, experts), TOLERANCE[torch.float32])


def test_nothing_here_gives_zeros() -> None:
    experts = random_experts("w8a16", 2, 32, 16)
    bank, x_TH = bank_of("w8a16", experts), torch.randn(3, 32)
    for nowhere in (torch.full((3, 2), -1), torch.full((3, 2), 2), torch.empty(3, 0, dtype=torch.int64)):
        assert torch.equal(bank(x_TH, nowhere, torch.ones(nowhere.shape)), torch.zeros_like(x_TH))


@pytest.mark.parametrize("name", ["bfloat16", "w8a8"])
def test_rows_of_others_do_not_reach_a_row(name: str) -> None:
    """Neither NaN in another token of the same block nor NaN in an expert that it does not pick."""
    torch.manual_seed(4)
    experts = random_experts(name, 3, 40, 24)
    slots_TK, weights_TK = torch.tensor([[0, 1], [0, 1], [1, 0]]), torch.rand(3, 2)
    x_TH = torch.randn(3, 40)
    alone_TH = bank_of(name, experts)(x_TH[1:2], slots_TK[1:2], weights_TK[1:2])
    if name == "bfloat16":
        experts[2] = tuple(torch.full_like(weight, float("nan")) for weight in experts[2])  # type: ignore[arg-type]
    x_TH[0] = x_TH[2] = float("nan")
    among_TH = bank_of(name, experts)(x_TH, slots_TK, weights_TK)[1:2]
    # Sums of int8 products are exact, so there is no other order in numpy that could show.
    torch.testing.assert_close(among_TH, alone_TH, rtol=0, atol=0 if name == "w8a8" else 1e-6)


@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_a_row_is_the_same_alone_and_among_many(block_m: int) -> None:
    """Exact sums (small integers) in any format would be; int8 products are exact for any numbers."""
    torch.manual_seed(5)
    experts = random_experts("w8a8", 4, 70, 40)
    x_TH, slots_TK, weights_TK = torch.randn(40, 70), torch.randint(-1, 4, (40, 3)), torch.rand(40, 3)
    together_TH = bank_of("w8a8", experts, (Tile(block_m, 32, 64, 4, 1),) * 2)(x_TH, slots_TK, weights_TK)
    bank = bank_of("w8a8", experts, (Tile(16, 32, 64, 4, 1),) * 2)
    for row in (0, 7, 39):
        alone_TH = bank(x_TH[row : row + 1], slots_TK[row : row + 1], weights_TK[row : row + 1])
        assert torch.equal(alone_TH[0], together_TH[row])


def test_terms_are_added_by_position_whatever_the_order_of_picks() -> None:
    torch.manual_seed(6)
    experts = random_experts("float32", 8, 32, 16)
    bank, x_TH, weights_TK = bank_of("float32", experts), torch.randn(2, 32), torch.rand(2, 6)
    slots_TK = torch.stack([torch.randperm(8)[:6] for _ in range(2)])
    order_TK = slots_TK.argsort(dim=1)
    sorted_TH = bank(x_TH, slots_TK.gather(1, order_TK), weights_TK.gather(1, order_TK))
    assert torch.equal(bank(x_TH, slots_TK, weights_TK), sorted_TH)


def test_rounding_to_int8() -> None:
    x_RD = torch.randn(5, 300) * torch.tensor([1.0, 1e-3, 0.0, 1e4, 1.0])[:, None]
    x_RD[4, :3] = torch.tensor([127.0, 2.5, -3.5])
    x_RD[4, 3:] = 0
    codes_RD, scale_R = round_to_int8(x_RD)
    torch.testing.assert_close(scale_R, x_RD.abs().amax(1) / 127)
    assert codes_RD[2].eq(0).all() and codes_RD[4, :3].tolist() == [127, 2, -4]
    assert (codes_RD * scale_R[:, None] - x_RD).abs().le(scale_R[:, None] * 0.5001).all()


@pytest.mark.parametrize("name", FORMATS)
def test_linear(name: str) -> None:
    torch.manual_seed(7)
    weight_NK, bias_N = stored(torch.randn(72, 100) * 0.1, name), torch.randn(72)
    x_BTK = torch.randn(2, 9, 200)[..., ::2]
    for bias in (None, bias_N):
        y_BTN = TritonLinear(weight_NK, bias)(x_BTK)
        weight, added = plain(weight_NK), torch.zeros(72) if bias is None else bias
        exact = F.linear(x_BTK.double(), weight, added.double())
        size = F.linear(x_BTK.double().abs(), weight.abs(), added.double().abs())
        check(y_BTN, (exact, size), tolerance_of(name, torch.float32))
    assert TritonLinear(weight_NK)(x_BTK[:, :0]).shape == (2, 0, 72)


def test_e8m0_scales_at_their_ends() -> None:
    """2 ** -127 is subnormal, and code 255 means NaN."""
    values = torch.full((4, 16), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[0], [1], [254], [255]], dtype=torch.uint8)
    layer = TritonLinear(QuantizedTensor(FORMATS["mxfp4"], 32, values, scales))
    y_TN = layer(torch.eye(32)[:1])
    assert y_TN[0, :3].tolist() == [2.0**-127, 2.0**-126, 2.0**127] and bool(y_TN[0, 3].isnan())
