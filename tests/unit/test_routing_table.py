"""Which replica serves a pick: any replica by the request's key, but near the token's first pick where that helps."""

import numpy as np
import pytest
import torch

from attention_nodes.forward.routing_table import LayerRoutes
from eplb import LayerExperts, LayerPlacement, round_robin

CPU = torch.device("cpu")


def routes_of(slots: list[tuple[int, int]], nodes: int) -> LayerRoutes:
    """From (expert, node) per slot."""
    experts, node_of_slot = np.array(slots, dtype=np.int32).T
    return LayerRoutes.of(LayerPlacement(experts, node_of_slot, int(experts.max()) + 1), nodes, CPU)


def slots(routes: LayerRoutes, experts: list[list[int]], keys: list[int]) -> list[list[int]]:
    return routes.slots(torch.tensor(experts), torch.tensor(keys)).tolist()


def test_without_replicas_each_expert_has_its_slot() -> None:
    routes = routes_of([(2, 0), (0, 1), (1, 0)], nodes=2)
    assert slots(routes, [[0, 1], [2, 0]], [5, 6]) == [[1, 2], [0, 1]]


def test_the_key_chooses_among_replicas() -> None:
    routes = routes_of([(0, 0), (0, 1), (0, 2)], nodes=3)
    assert slots(routes, [[0]] * 6, [0, 1, 2, 3, 4, 5]) == [[0], [1], [2], [0], [1], [2]]


def test_further_picks_stay_on_the_first_picks_node_where_that_has_a_replica() -> None:
    # Expert 0 on nodes 0 and 1, expert 1 on nodes 0 and 1, expert 2 on node 2 only.
    routes = routes_of([(0, 0), (1, 0), (0, 1), (1, 1), (2, 2)], nodes=3)
    assert slots(routes, [[0, 1, 2]] * 2, [0, 1]) == [[0, 1, 4], [2, 3, 4]]
    # A first pick with no choice draws the others to its own node; where that has none of them the key decides.
    routes = routes_of([(0, 0), (1, 0), (1, 1), (2, 1), (3, 2)], nodes=3)
    assert slots(routes, [[2, 1]] * 2, [0, 1]) == [[3, 2]] * 2
    assert slots(routes, [[3, 1]] * 2, [0, 1]) == [[4, 1], [4, 2]]


def test_a_shared_expert_on_every_node_costs_no_message_of_its_own() -> None:
    placed = round_robin([LayerExperts(routed=8, shared=1)], ["a", "b", "c"]).layers[0]
    routes = LayerRoutes.of(placed, 3, CPU)
    experts_TK = torch.tensor([[expert, 8] for expert in range(8)])
    for key in range(4):
        node_TK = routes.node_of_slot_S[routes.slots(experts_TK, torch.full((8,), key))]
        assert torch.equal(node_TK[:, 0], node_TK[:, 1])


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
@pytest.mark.parametrize("spare", [0.0, 0.5, 2.0])
def test_every_pick_gets_a_slot_of_its_expert_whatever_else_is_in_the_batch(nodes: int, spare: float) -> None:
    placed = round_robin([LayerExperts(routed=10, shared=1)], [str(n) for n in range(nodes)], spare).layers[0]
    routes = LayerRoutes.of(placed, nodes, CPU)
    generator = torch.Generator().manual_seed(nodes)
    experts_TK = torch.rand(200, 11, generator=generator).argsort(-1)[:, :4]
    keys_T = torch.randint(2**31, (200,), generator=generator)
    slots_TK = routes.slots(experts_TK, keys_T)
    assert torch.equal(torch.from_numpy(placed.expert_of_slot_S)[slots_TK], experts_TK.int())
    for row in (0, 57, 199):
        assert torch.equal(routes.slots(experts_TK[row : row + 1], keys_T[row : row + 1]), slots_TK[row : row + 1])
    used = {(int(e), int(s)) for e, s in zip(experts_TK[:, 0], slots_TK[:, 0], strict=True) if e < 10}
    assert len(used) == (placed.expert_of_slot_S < 10).sum(), "as first picks, all replicas serve"
