"""Messages of fixed capacity carry the same tokens as exact ones, and decide nothing by what is on the device.

Legend: T tokens, K picks, H hidden, N nodes.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_remote_experts import collect, random_call
from tiny_cluster import FINGERPRINT, ffn_node, linked, place, tiny_spec, weighted_sum
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from attention_nodes.forward.remote_experts import RemoteExperts
from attention_nodes.forward.routing_table import routing_table
from attention_nodes.forward.token_split import (
    BucketSplit,
    ExactSplit,
    LayerTokens,
    Share,
    TokenSplit,
    bucket,
    expected_visits,
)

SPEC = tiny_spec()
HIDDEN = 3


def layer_tokens(tokens: int, picks: int, nodes: int, seed: int, skew: float = 0.0) -> LayerTokens:
    """Slot s is on node s % nodes; with skew, most picks go to node 0."""
    generator = torch.Generator().manual_seed(seed)
    slots_TK = torch.randint(0, 4 * nodes, (tokens, picks), generator=generator)
    to_first_TK = torch.rand(tokens, picks, generator=generator) < skew
    slots_TK = torch.where(to_first_TK, slots_TK - slots_TK % nodes, slots_TK)
    x_TH = torch.randn(tokens, HIDDEN, generator=generator)
    return LayerTokens([x_TH], torch.rand(tokens, picks, generator=generator), slots_TK, slots_TK % nodes)


def received(shares: list[Share]) -> dict[int, list[tuple[int, list[float], list[int], list[float]]]]:
    """Per node what arrived: (row, hidden, slots, weights) of each place that is taken, in order."""
    got: dict[int, list[tuple[int, list[float], list[int], list[float]]]] = {}
    for share in shares:
        x_UH, slots_UK, weights_UK = share.parts
        assert slots_UK.dtype == torch.int32
        rows = range(len(x_UH)) if share.rows_U is None else share.rows_U.tolist()
        for place_, row in enumerate(rows):
            if bool((slots_UK[place_] >= 0).any()):
                entry = (row, x_UH[place_].tolist(), slots_UK[place_].tolist(), weights_UK[place_].tolist())
                got.setdefault(share.node, []).append(entry)
    return got


def all_shares(split: TokenSplit, tokens: LayerTokens, nodes: int) -> list[Share]:
    shares, left_over = split.shares(0, tokens, range(nodes))
    if left_over is not None:
        shares += [split.rest(0, tokens, node) for node, count in enumerate(left_over.read()) if count > 0]
    return shares


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 5), st.integers(1, 5), st.integers(0, 999), st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.01, 0.3, 1.0, 1.25]),
)  # fmt: skip
def test_buckets_carry_what_exact_messages_carry(
    tokens: int, picks: int, nodes: int, seed: int, skew: float, slack: float
) -> None:
    layer = layer_tokens(tokens, picks, nodes, seed, skew)
    visits = [[1 - (1 - 1 / nodes) ** picks] * nodes]
    bucketed = all_shares(BucketSplit(visits, slack), layer, nodes)
    assert received(bucketed) == received(all_shares(ExactSplit(), layer, nodes))
    per_node = [share.node for share in bucketed]
    assert all(per_node.count(node) <= 2 for node in range(nodes))


@given(st.integers(0, 100_000))
def test_a_bucket_holds_its_rows_and_wastes_little(rows: int) -> None:
    size = bucket(rows)
    assert size >= rows and (size == 8 or size <= rows * 1.25)
    assert bucket(size) == size


def test_few_sizes() -> None:
    assert len({bucket(rows) for rows in range(4097)}) < 45


def test_expected_visits_of_a_placement() -> None:
    placed = place(SPEC, 2).layers[2]
    assert expected_visits(placed, 2, 3) == pytest.approx([1 - 0.5**3] * 2)
    full = place(SPEC, 2, spare=1.0).layers[2]
    assert expected_visits(full, 2, 1) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("slack", [0.05, 1.25])
@pytest.mark.parametrize("wire", ["same", "int8"])
def test_sums_equal_a_local_computation_with_buckets(slack: float, wire: str) -> None:
    """Through real servers and links; with little slack nearly every node gets a second message."""
    placement = place(SPEC, 3, 0.5)
    nodes, links = [ffn_node(SPEC, placement, node, wire=wire) for node in range(3)], {}
    for index, node in enumerate(nodes):
        links[index], far = linked(0, index)
        node.links.append(far)
    visits = [
        expected_visits(placed, 3, layer.ffn.picks) for placed, layer in zip(placement.layers, SPEC.layers, strict=True)
    ]
    remote = RemoteExperts(0, links, placement, FINGERPRINT, wire=wire, split=BucketSplit(visits, slack))
    messages = 0
    for layer in range(len(SPEC.layers)):
        call = random_call(layer, 40, seed=layer)
        remote.dispatch(0, layer, 0, call)
        for _ in range(2):
            for node in nodes:
                node.run()
            done = collect(remote)
        pending = remote.finish(0)
        messages += len(pending.sent)
        expected_TH = weighted_sum(SPEC, layer, call.x_TH, call.experts_TK, call.weights_TK)
        bound = 1e-4 if wire == "same" else 0.3
        torch.testing.assert_close(pending.total(), expected_TH, rtol=bound, atol=bound)
        assert done == [] or done == [0]
    assert not [node.refused for node in nodes if node.refused]
    assert (messages > 9) == (slack < 1)


def test_no_size_is_read_from_the_device() -> None:
    """Under fake tensors there is nothing to read, so whatever asks for a value raises."""
    placement = place(SPEC, 3, 0.5)
    call = random_call(2, 40)
    routes = routing_table(placement, torch.device("cpu"))[2]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x_TH, experts_TK, weights_TK, keys_T = (
        mode.from_tensor(part) for part in (call.x_TH, call.experts_TK, call.weights_TK, call.replica_keys_T)
    )
    visits = [expected_visits(placed, 3, 3) for placed in placement.layers]
    with mode:
        slots_TK = routes.slots(experts_TK, keys_T)
        tokens = LayerTokens([x_TH], weights_TK, slots_TK, routes.node_of_slot_S[slots_TK])
        split = BucketSplit(visits, 0.5)
        shares, left_over = split.shares(2, tokens, range(3))
        shares.append(split.rest(2, tokens, 1))
        assert all(isinstance(share.rows_U, Tensor) and len(share.parts[0]) == len(share.rows_U) for share in shares)
        assert left_over is not None
        with pytest.raises(DataDependentOutputException):
            left_over.read()
        with pytest.raises(DynamicOutputShapeException):
            ExactSplit().shares(2, tokens, range(3))
