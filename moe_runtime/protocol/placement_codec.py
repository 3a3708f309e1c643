"""eplb.Placement to its wire form and back; eplb itself knows no wire."""

import numpy as np

from eplb import LayerPlacement, Placement
from moe_runtime.protocol.control import LayerSlots, PlacementMessage


def placement_to_message(placement: Placement) -> PlacementMessage:
    """The wire form of a placement."""
    layers = tuple(
        LayerSlots(tuple(layer.expert_of_slot_S.tolist()), tuple(layer.node_of_slot_S.tolist()), layer.experts)
        for layer in placement.layers
    )
    return PlacementMessage(placement.epoch, placement.nodes, layers)


def placement_from_message(message: PlacementMessage) -> Placement:
    """The placement that a message carries. Raises ValueError when a layer's slots contradict each other."""
    return Placement(message.epoch, message.nodes, tuple(_layer(slots, len(message.nodes)) for slots in message.layers))


def _layer(slots: LayerSlots, nodes: int) -> LayerPlacement:
    node_of_slot_S = np.array(slots.node_of_slot, dtype=np.int32)
    if len(node_of_slot_S) and not 0 <= node_of_slot_S.min() <= node_of_slot_S.max() < nodes:
        raise ValueError(f"a slot lies on node {node_of_slot_S.min()}..{node_of_slot_S.max()}: expected 0..{nodes - 1}")
    return LayerPlacement(np.array(slots.expert_of_slot, dtype=np.int32), node_of_slot_S, slots.experts)
