"""Placement: what round-robin guarantees for any model and any number of nodes, and its wire form."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb import LayerExperts, LayerPlacement, round_robin
from moe_runtime.protocol.placement_codec import placement_from_message, placement_to_message

layers = st.lists(st.builds(LayerExperts, st.integers(0, 40), st.integers(0, 1)), min_size=1, max_size=5)
names = st.integers(1, 7).map(lambda count: tuple(f"f{i}" for i in range(count)))
spares = st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0, 8.0])


@given(layers, names, spares)
def test_round_robin_places_every_expert_soundly(
    experts_L: list[LayerExperts], nodes: tuple[str, ...], spare: float
) -> None:
    placement = round_robin(experts_L, nodes, spare, epoch=7)
    assert (placement.epoch, placement.nodes, len(placement.layers)) == (7, nodes, len(experts_L))
    for experts, layer in zip(experts_L, placement.layers, strict=True):
        extra = min(math.ceil(experts.routed * spare), experts.routed * (len(nodes) - 1))
        assert len(layer.expert_of_slot_S) == experts.routed + extra + experts.shared * len(nodes)
        assert layer.replica_counts_E.sum() == len(layer.expert_of_slot_S)
        assert layer.replica_counts_E[: experts.routed].min(initial=1) >= 1
        assert (layer.replica_counts_E[experts.routed :] == len(nodes)).all()
        homes = set(zip(layer.expert_of_slot_S.tolist(), layer.node_of_slot_S.tolist(), strict=True))
        assert len(homes) == len(layer.expert_of_slot_S), "a node holds two replicas of one expert"
        assert sorted(np.concatenate([layer.slots_on(n) for n in range(len(nodes))])) == list(
            range(len(layer.expert_of_slot_S))
        )


@given(st.integers(1, 40), names)
def test_round_robin_without_spares_is_even(routed: int, nodes: tuple[str, ...]) -> None:
    layer = round_robin([LayerExperts(routed)], nodes).layers[0]
    loads = [len(layer.slots_on(node)) for node in range(len(nodes))]
    assert max(loads) - min(loads) <= 1


@given(layers, names, spares)
def test_replica_tables_agree_with_the_slots(
    experts_L: list[LayerExperts], nodes: tuple[str, ...], spare: float
) -> None:
    for layer in round_robin(experts_L, nodes, spare).layers:
        for expert, slots in enumerate(layer.replicas_ER):
            assert (layer.expert_of_slot_S[slots] == expert).all()
            assert len(set(slots.tolist())) == layer.replica_counts_E[expert]
        for expert, row in enumerate(layer.slot_on_node_EN(len(nodes))):
            for node, slot in enumerate(row.tolist()):
                here = [s for s in layer.slots_on(node).tolist() if layer.expert_of_slot_S[s] == expert]
                assert slot == (here[0] if here else -1)


@given(layers, names, spares)
def test_the_wire_form_keeps_everything(experts_L: list[LayerExperts], nodes: tuple[str, ...], spare: float) -> None:
    message = placement_to_message(round_robin(experts_L, nodes, spare, epoch=3))
    assert placement_to_message(placement_from_message(message)) == message


def test_unsound_placements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        round_robin([LayerExperts(4)], [])
    with pytest.raises(ValueError, match=r"spare is -0\.5"):
        round_robin([LayerExperts(4)], ["f0"], -0.5)
    with pytest.raises(ValueError, match="expert 1 has no slot"):
        LayerPlacement(np.array([0, 0], np.int32), np.array([0, 1], np.int32), 2)
    message = placement_to_message(round_robin([LayerExperts(4)], ["f0", "f1"]))
    with pytest.raises(ValueError, match=r"a slot lies on node 0\.\.1: expected 0\.\.0"):
        placement_from_message(msgspec.structs.replace(message, nodes=("f0",)))
