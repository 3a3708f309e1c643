"""The attention half's layers against plain formulas written out here."""

import msgspec
import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.linear import can_pack
from moe_runtime.layers.attention_inputs import project_output, project_qkv
from moe_runtime.layers.norm import rms_norm
from moe_runtime.layers.rope import RotaryTable, apply_rope
from moe_runtime.layers.router import route
from moe_runtime.models.packing import pack_attention
from moe_runtime.models.spec import FfnSpec, LayerSpec, ModelSpec, RopeSpec
from moe_runtime.models.weights import AttentionLayerWeights, AttentionWeights

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 24, 4, 2, 6
SPEC = ModelSpec(
    family="mixtral",
    vocab=32,
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_context=64,
    layers=(LayerSpec(FfnSpec(8, 3, 16)),),
    rope=RopeSpec((1.0, 0.1, 0.01)),
    norm_eps=1e-5,
    attention_scale=1.0,
)


def layer_weights(seed: int = 0) -> AttentionLayerWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return AttentionLayerWeights(
        input_norm_H=draw(HIDDEN),
        qkv_PH=draw(rows, HIDDEN),
        o_HQ=draw(HIDDEN, HEADS * HEAD_DIM),
        post_norm_H=draw(HIDDEN),
        qkv_bias_P=draw(rows),
        o_bias_H=draw(HIDDEN),
        router_EH=draw(8, HIDDEN),
        shared_gate_1H=draw(1, HIDDEN),
    )


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def rotate_pair(x_D: Tensor, position: int) -> Tensor:
    """Rotation of (d, d + D/2) as complex numbers."""
    half = len(x_D) // 2
    pairs = torch.complex(x_D[:half], x_D[half:])
    turned = pairs * torch.polar(torch.ones(half), position * torch.tensor(SPEC.rope.inv_freq))
    return torch.cat((turned.real, turned.imag))


def test_rms_norm_accumulates_bfloat16_in_float32() -> None:
    x_TH, weight_H = tokens(5).bfloat16(), torch.rand(HIDDEN).bfloat16()
    mean_T1 = x_TH.float().square().mean(dim=-1, keepdim=True)
    expected_TH = x_TH.float() / (mean_T1 + 1e-5).sqrt() * weight_H.float()
    out_TH = rms_norm(x_TH, weight_H, 1e-5)
    assert out_TH.dtype == torch.bfloat16
    torch.testing.assert_close(out_TH.float(), expected_TH, rtol=2**-7, atol=1e-6)


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    positions_T = torch.tensor([0, 3, 40])
    x_TND = torch.randn(3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    turned_TND = apply_rope(x_TND, *RotaryTable(SPEC.rope.inv_freq)(positions_T, torch.float32))
    for token, position in enumerate(positions_T.tolist()):
        for head in range(2):
            torch.testing.assert_close(turned_TND[token, head], rotate_pair(x_TND[token, head], position))


def test_rope_scale_multiplies_the_result() -> None:
    x_TND, positions_T = torch.randn(2, 1, HEAD_DIM), torch.tensor([5, 6])
    plain_TND = apply_rope(x_TND, *RotaryTable(SPEC.rope.inv_freq)(positions_T, torch.float32))
    scaled_TND = apply_rope(x_TND, *RotaryTable(SPEC.rope.inv_freq, scale=1.5)(positions_T, torch.float32))
    torch.testing.assert_close(scaled_TND, 1.5 * plain_TND)


def test_project_qkv_splits_heads_in_order_with_bias_and_clip() -> None:
    weights, x_TH = layer_weights(), tokens(4)
    spec = msgspec.structs.replace(SPEC, qkv_clip=2.0)
    still = RotaryTable(SPEC.rope.inv_freq)(torch.zeros(4, dtype=torch.int64), torch.float32)
    q_TAD, k_TGD, v_TGD = project_qkv(x_TH, weights, spec, *still)
    assert weights.qkv_bias_P is not None
    expected_TP = (x_TH @ weights.qkv_PH.T + weights.qkv_bias_P).clamp(-2, 2)
    assert (expected_TP.abs() == 2).any()
    joined_TP = torch.cat((q_TAD.flatten(1), k_TGD.flatten(1), v_TGD.flatten(1)), dim=1)
    torch.testing.assert_close(joined_TP, expected_TP, rtol=0, atol=1e-5)


def test_project_output_adds_its_bias() -> None:
    weights, o_TQ = layer_weights(), torch.randn(3, HEADS * HEAD_DIM)
    assert weights.o_bias_H is not None
    torch.testing.assert_close(project_output(o_TQ, weights), o_TQ @ weights.o_HQ.T + weights.o_bias_H)


def expected_route(logits_E: Tensor, top_k: int, spec: ModelSpec) -> dict[int, float]:
    order = sorted(range(len(logits_E)), key=lambda expert: -float(logits_E[expert]))[:top_k]
    pool = logits_E[order] if spec.router == "topk_softmax" else logits_E
    raw = {expert: float((logits_E[expert].double() - pool.double().logsumexp(0)).exp()) for expert in order}
    total = sum(raw.values()) if spec.norm_topk else 1.0
    return {expert: value / total for expert, value in raw.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", ["softmax_topk", "topk_softmax"])
@pytest.mark.parametrize("norm_topk", [False, True])
def test_route(router: str, norm_topk: bool, dtype: torch.dtype) -> None:
    spec = msgspec.structs.replace(SPEC, router=router, norm_topk=norm_topk)
    weights, x_TH = layer_weights(), tokens(20).to(dtype)
    assert weights.router_EH is not None
    experts_TK, weights_TK = route(x_TH, weights, spec, FfnSpec(8, 3, 16))
    assert experts_TK.dtype == torch.int64 and weights_TK.dtype == torch.float32
    for token, logits_E in enumerate(x_TH.float() @ weights.router_EH.T):
        expected = expected_route(logits_E, 3, spec)
        assert experts_TK[token].tolist() == list(expected)
        assert weights_TK[token].tolist() == pytest.approx(list(expected.values()), abs=1e-5)


def test_the_always_picked_expert_is_the_last_column() -> None:
    weights, x_TH = layer_weights(), tokens(5)
    assert weights.shared_gate_1H is not None
    routed, gated = FfnSpec(8, 3, 16), FfnSpec(8, 3, 16, shared_intermediate=32, shared_gate=True)
    experts_TK, weights_TK = route(x_TH, weights, SPEC, gated)
    without = route(x_TH, weights, SPEC, routed)
    assert torch.equal(experts_TK[:, :-1], without[0]) and torch.equal(weights_TK[:, :-1], without[1])
    assert experts_TK[:, -1].tolist() == [8] * 5
    torch.testing.assert_close(weights_TK[:, -1:], torch.sigmoid(x_TH @ weights.shared_gate_1H.T))


def test_a_dense_layer_is_one_expert_of_weight_one() -> None:
    dense = msgspec.structs.replace(FfnSpec(0, 0, 0), shared_intermediate=48)
    weights = AttentionLayerWeights(*[torch.zeros(1)] * 4)
    experts_TK, weights_TK = route(tokens(3), weights, SPEC, dense)
    assert experts_TK.tolist() == [[0]] * 3 and weights_TK.tolist() == [[1.0]] * 3


@pytest.mark.skipif(not can_pack(torch.empty(1, 1)), reason="this torch build cannot pack weights")
def test_packed_weights_give_the_same_results_and_do_not_depend_on_the_batch() -> None:
    plain = layer_weights()
    model = AttentionWeights(torch.randn(32, HIDDEN), (plain,), torch.ones(HIDDEN), torch.randn(32, HIDDEN))
    packed_model = pack_attention(model)
    packed, x_TH = packed_model.layers[0], tokens(70)
    assert packed_model.embed_VH is model.embed_VH and packed_model.lm_head_VH.is_mkldnn and packed.qkv_PH.is_mkldnn
    tables = RotaryTable(SPEC.rope.inv_freq)(torch.arange(70), torch.float32)
    ffn = FfnSpec(8, 3, 16, shared_intermediate=32, shared_gate=True)
    both = [(*project_qkv(x_TH, w, SPEC, *tables), *route(x_TH, w, SPEC, ffn)) for w in (plain, packed)]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    alone = (*project_qkv(x_TH[3:4], packed, SPEC, *(t[3:4] for t in tables)), *route(x_TH[3:4], packed, SPEC, ffn))
    for one, many in zip(alone, both[1], strict=True):
        assert torch.equal(one, many[3:4])
