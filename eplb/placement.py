"""Which physical slot holds which logical expert, and on which node: one immutable object per epoch.

Legend: L layers, S physical slots of a layer, E logical experts of a layer, R most replicas of an expert, N nodes.
A layer's logical experts are its routed experts 0..routed-1, then the experts that every token picks (a shared expert,
or the whole FFN of a dense layer). Slot ids are global within a layer, so an id sent to the wrong node is noticed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class LayerExperts:
    """How many logical experts a layer has: `routed` are chosen by the gate, `shared` are picked by every token."""

    routed: int
    shared: int = 0

    @property
    def total(self) -> int:
        return self.routed + self.shared


@dataclass(frozen=True, eq=False)
class LayerPlacement:
    """One layer's slots: expert_of_slot_S and node_of_slot_S, both int32 [S]."""

    expert_of_slot_S: IntArray
    node_of_slot_S: IntArray
    experts: int

    def __post_init__(self) -> None:
        if self.expert_of_slot_S.shape != self.node_of_slot_S.shape or self.expert_of_slot_S.ndim != 1:
            raise ValueError(
                f"expert_of_slot has shape {self.expert_of_slot_S.shape}, node_of_slot {self.node_of_slot_S.shape}: "
                "expected one entry of each per slot"
            )
        counts_E = np.bincount(self.expert_of_slot_S, minlength=self.experts)
        if len(counts_E) != self.experts:
            raise ValueError(f"a slot holds expert {len(counts_E) - 1}, but the layer has {self.experts} experts")
        if self.experts and counts_E.min() == 0:
            raise ValueError(f"expert {int(counts_E.argmin())} has no slot")

    @cached_property
    def replica_counts_E(self) -> IntArray:
        """Number of replicas of each logical expert, int32 [E]."""
        return np.bincount(self.expert_of_slot_S, minlength=self.experts).astype(np.int32)

    @cached_property
    def replicas_ER(self) -> IntArray:
        """Slots of each logical expert in ascending order, int32 [E, R]; unused entries repeat the first slot."""
        most = int(self.replica_counts_E.max(initial=1))
        table = np.empty((self.experts, most), dtype=np.int32)
        for expert in range(self.experts):
            slots = np.flatnonzero(self.expert_of_slot_S == expert)
            table[expert] = slots[0]
            table[expert, : len(slots)] = slots
        return table

    def slots_on(self, node: int) -> IntArray:
        """Global slot ids on a node, ascending, int32."""
        return np.flatnonzero(self.node_of_slot_S == node).astype(np.int32)

    def slot_on_node_EN(self, nodes: int) -> IntArray:
        """The first slot of each expert on each node, or -1: int32 [E, N]."""
        table = np.full((self.experts, nodes), -1, dtype=np.int32)
        for slot in range(len(self.expert_of_slot_S) - 1, -1, -1):
            table[self.expert_of_slot_S[slot], self.node_of_slot_S[slot]] = slot
        return table


@dataclass(frozen=True, eq=False)
class Placement:
    """All layers' slots over named nodes, valid for one epoch."""

    epoch: int
    nodes: tuple[str, ...]
    layers: tuple[LayerPlacement, ...]


def round_robin(
    experts_L: Sequence[LayerExperts], nodes: Sequence[str], spare: float = 0.0, epoch: int = 0
) -> Placement:
    """Deal routed experts to nodes in turn, then ceil(routed * spare) extra replicas; every node gets the shared ones.

    Each layer starts one node further than the layer before, so that remainders spread evenly.
    Raises ValueError when there is no node or spare is negative.
    """
    if not nodes:
        raise ValueError("a placement needs at least one node")
    if spare < 0:
        raise ValueError(f"spare is {spare}: expected a fraction of at least 0")
    layers = tuple(_deal(experts, layer, len(nodes), spare) for layer, experts in enumerate(experts_L))
    return Placement(epoch, tuple(nodes), layers)


def _deal(experts: LayerExperts, layer: int, nodes: int, spare: float) -> LayerPlacement:
    extra = int(np.ceil(experts.routed * spare)) if nodes > 1 else 0
    # An extra replica of expert e lands one node after e's last one, never on a node that has it already.
    extra = min(extra, experts.routed * (nodes - 1))
    copies = np.arange(experts.routed + extra)
    expert_routed = copies % max(experts.routed, 1)
    node_routed = (expert_routed + layer + copies // max(experts.routed, 1)) % nodes
    shared = np.repeat(np.arange(experts.routed, experts.total), nodes)
    shared_nodes = np.tile(np.arange(nodes), experts.shared)
    expert_of_slot = np.concatenate([expert_routed, shared]).astype(np.int32)
    node_of_slot = np.concatenate([node_routed, shared_nodes]).astype(np.int32)
    return LayerPlacement(expert_of_slot, node_of_slot, experts.total)
