"""One node's experts: banks of several sizes, global slot ids, and what is not there."""

import numpy as np
import pytest
import torch
from tiny_cluster import expert_layers, place, tiny_spec, weighted_sum

from eplb import LayerPlacement, Placement
from ffn_nodes.load import ExpertLoad
from moe_runtime.errors import ProtocolError

SPEC = tiny_spec()


def random_call(layer: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x_TH, experts_TK, weights_TK) with distinct picks per token."""
    generator = torch.Generator().manual_seed(seed)
    ffn = SPEC.layers[layer].ffn
    routed_TK = torch.rand(tokens, ffn.routed, generator=generator).argsort(-1)[:, : ffn.top_k]
    shared_TK = torch.full((tokens, ffn.experts.shared), ffn.routed)
    x_TH = torch.randn(tokens, SPEC.hidden, generator=generator)
    return x_TH, torch.cat([routed_TK, shared_TK], 1), torch.rand(tokens, ffn.picks, generator=generator)


@pytest.mark.parametrize("layer", range(len(SPEC.layers)))
def test_one_node_with_everything_gives_the_weighted_sum(layer: int) -> None:
    placement = place(SPEC, 1)
    x_TH, experts_TK, weights_TK = random_call(layer, 9)
    slots_TK = torch.from_numpy(placement.layers[layer].replicas_ER)[experts_TK, 0]
    y_TH = expert_layers(SPEC, placement, 0)[layer](x_TH, slots_TK.int(), weights_TK)
    torch.testing.assert_close(y_TH, weighted_sum(SPEC, layer, x_TH, experts_TK, weights_TK), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("layer", range(len(SPEC.layers)))
def test_the_parts_of_several_nodes_add_up(layer: int, nodes: int) -> None:
    placement = place(SPEC, nodes)
    x_TH, experts_TK, weights_TK = random_call(layer, 9)
    placed = placement.layers[layer]
    slots_TK = torch.from_numpy(placed.replicas_ER).long()[experts_TK, 0]
    node_TK = torch.from_numpy(placed.node_of_slot_S)[slots_TK]
    y_TH = sum(
        expert_layers(SPEC, placement, node)[layer](x_TH, torch.where(node_TK == node, slots_TK, -1), weights_TK)
        for node in range(nodes)
    )
    torch.testing.assert_close(y_TH, weighted_sum(SPEC, layer, x_TH, experts_TK, weights_TK), rtol=1e-5, atol=1e-5)


def test_a_node_holds_each_size_in_its_own_bank_and_nothing_it_was_not_given() -> None:
    layers = expert_layers(SPEC, place(SPEC, 2), 0)
    assert [len(layer.banks) for layer in layers] == [1, 2, 1]
    kinds = [[(bank.shape.experts, bank.shape.intermediate) for bank in layer.banks] for layer in layers[1:]]
    assert kinds == [[(3, 16), (1, 8)], [(3, 16)]]
    assert layers[1].nbytes == sum(bank.nbytes for bank in layers[1].banks) > layers[2].nbytes > 0


def test_a_node_without_experts_of_a_layer_answers_zeros() -> None:
    empty = LayerPlacement(np.zeros(1, np.int32), np.zeros(1, np.int32), 1)
    placement = Placement(0, ("ffn-0", "ffn-1"), (empty, *place(SPEC, 2).layers[1:]))
    layer = expert_layers(SPEC, placement, 1)[0]
    x_TH = torch.randn(3, SPEC.hidden)
    assert layer(x_TH, torch.full((3, 1), -1), torch.ones(3, 1)).eq(0).all()
    with pytest.raises(ProtocolError, match=r"slot 0 is not on this node, which holds \[\]"):
        layer.check(np.array([[0]]))


def test_check_names_the_first_slot_that_does_not_belong_here() -> None:
    layer = expert_layers(SPEC, place(SPEC, 2), 0)[2]  # slots 0..5 of which even ones are here
    layer.check(np.array([[0, 2, -1], [4, -1, -1]]))
    with pytest.raises(ProtocolError, match=r"slot 3 is not on this node, which holds \[0, 2, 4\]"):
        layer.check(np.array([[0, 3, 5]]))
    for foreign in (6, 99, -2):
        with pytest.raises(ProtocolError, match=rf"slot id {foreign} does not exist: this layer has slots 0\.\.5"):
            layer.check(np.array([[0, foreign, 1]]))


def test_on_a_gpu_a_wrong_slot_makes_its_token_nan_and_no_other() -> None:
    """The path without host reads, on the CPU: right tokens as ever, the wrong ones not to be mistaken for right."""
    layer = expert_layers(SPEC, place(SPEC, 2), 0)[2]
    x_TH, _, weights_TK = random_call(2, 5)
    slots_TK = torch.tensor([[0, 2, 4], [4, -1, -1], [0, 3, 2], [-1, -1, -1], [99, 0, 2]])
    y_TH = layer._unchecked(x_TH, slots_TK, weights_TK)
    assert y_TH[[2, 4]].isnan().all()
    good = [0, 1, 3]
    torch.testing.assert_close(y_TH[good], layer(x_TH[good], slots_TK[good], weights_TK[good]))


def test_tokens_counted_on_a_device_are_those_counted_here() -> None:
    layer = expert_layers(SPEC, place(SPEC, 2, spare=0.5), 0)[2]
    here, there = ExpertLoad(SPEC), ExpertLoad(SPEC)
    held = np.flatnonzero(layer.held_S)
    for seed in range(3):
        slots_TK = torch.from_numpy(np.random.default_rng(seed).choice([*held, -1], size=(7, 3)))
        here.count(2, layer, slots_TK, 1, 0.1)
        there._count_on_device(2, layer, slots_TK)
        there.fetch()
    there.fetch()
    assert here.tokens[2].tolist() == there.tokens[2].tolist() and here.tokens[2].sum() > 0
