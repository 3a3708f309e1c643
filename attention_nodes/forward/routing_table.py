"""From the gate's logical experts to physical slots: which replica serves a token, by one placement.

Legend: T tokens, K picks, E logical experts of a layer, R replicas, S slots, N nodes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eplb import LayerPlacement, Placement


@dataclass(frozen=True)
class LayerRoutes:
    """One layer's tables as tensors."""

    replicas_ER: Tensor
    counts_E: Tensor
    node_of_slot_S: Tensor
    slot_on_node_EN: Tensor
    replicated: bool

    @classmethod
    def of(cls, placed: LayerPlacement, nodes: int, device: torch.device) -> "LayerRoutes":
        def tensor(array: object) -> Tensor:
            return torch.as_tensor(array, dtype=torch.int64, device=device)

        return cls(
            tensor(placed.replicas_ER),
            tensor(placed.replica_counts_E),
            tensor(placed.node_of_slot_S),
            tensor(placed.slot_on_node_EN(nodes)),
            bool(placed.replica_counts_E.max(initial=1) > 1),
        )

    def slots(self, experts_TK: Tensor, keys_T: Tensor) -> Tensor:
        """Global slot ids, int64 [T, K]: by the request's key among replicas, but on the node of the token's first
        pick where that has one, which saves a message. Depends on nothing but the token and its request."""
        if not self.replicated:
            return self.replicas_ER[experts_TK, 0]
        choice_TK = keys_T.unsqueeze(1) % self.counts_E[experts_TK]
        slots_TK = self.replicas_ER[experts_TK, choice_TK]
        first_node_T1 = self.node_of_slot_S[slots_TK[:, :1]]
        near_TK = self.slot_on_node_EN[experts_TK, first_node_T1]
        return torch.where(near_TK >= 0, near_TK, slots_TK)


def routing_table(placement: Placement, device: torch.device) -> tuple[LayerRoutes, ...]:
    return tuple(LayerRoutes.of(placed, len(placement.nodes), device) for placed in placement.layers)
