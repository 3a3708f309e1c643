"""The attention node's side of the exchange, against expert servers at the other end of in-process links."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_cluster import FINGERPRINT, FfnNode, ffn_node, linked, place, tiny_spec, weighted_sum

from attention_nodes.forward.model import ExpertCall
from attention_nodes.forward.remote_experts import RemoteExperts, ReplyError
from eplb import Placement
from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.header import Header, Kind, PayloadType
from moe_runtime.protocol.payload import Frame

SPEC = tiny_spec()


def exchange(placement: Placement, senders: int = 1, wire: str = "same") -> tuple[list[RemoteExperts], list[FfnNode]]:
    nodes = [ffn_node(SPEC, placement, node, wire=wire) for node in range(len(placement.nodes))]
    remotes = []
    for sender in range(senders):
        links = {}
        for index, node in enumerate(nodes):
            links[index], far = linked(sender, index)
            node.links.append(far)
        remotes.append(RemoteExperts(sender, links, placement, FINGERPRINT, wire=wire))
    return remotes, nodes


def random_call(layer: int, tokens: int, seed: int = 0) -> ExpertCall:
    generator = torch.Generator().manual_seed(seed)
    ffn = SPEC.layers[layer].ffn
    routed_TK = torch.rand(tokens, ffn.routed, generator=generator).argsort(-1)[:, : ffn.top_k]
    shared_TK = torch.full((tokens, ffn.experts.shared), ffn.routed)
    return ExpertCall(
        layer,
        torch.randn(tokens, SPEC.hidden, generator=generator),
        torch.cat([routed_TK, shared_TK], 1),
        torch.rand(tokens, ffn.picks, generator=generator),
        torch.randint(2**31, (tokens,), generator=generator),
    )


def call_with(experts: list[list[int]]) -> ExpertCall:
    """A call of layer 2 (6 routed experts, 3 picks) with chosen picks."""
    call = random_call(2, len(experts), seed=1)
    return replace(call, experts_TK=torch.tensor(experts))


def frames(remote: RemoteExperts, node: int) -> list[Frame]:
    return list(iter(remote.links[node].receive, None))


def collect(remote: RemoteExperts, order: Callable[[list[int]], list[int]] = sorted) -> list[int]:
    """Take all replies, nodes in the given order; the lanes that became complete."""
    done = [remote.accept(node, frame) for node in order(list(remote.links)) for frame in frames(remote, node)]
    return [lane for lane in done if lane is not None]


@pytest.mark.parametrize(("wire", "least", "most"), [("int8", 1e-3, 0.015), ("fp8", 0.005, 0.08)])
def test_a_quantized_wire_costs_its_rounding_and_no_more(wire: str, least: float, most: float) -> None:
    (remote,), nodes = exchange(place(SPEC, 3), wire=wire)
    for layer in range(len(SPEC.layers)):
        call = random_call(layer, 9, seed=layer)
        remote.dispatch(0, layer, 0, call)
        for node in nodes:
            node.run()
        assert collect(remote) == [0]
        expected_TH = weighted_sum(SPEC, layer, call.x_TH, call.experts_TK, call.weights_TK)
        error = float((remote.finish(0).total() - expected_TH).norm() / expected_TH.norm())
        assert least < error < most


def test_nodes_that_expect_another_wire_refuse() -> None:
    (remote,), nodes = exchange(place(SPEC, 1), wire="int8")
    remote._wire = "same"
    remote.dispatch(0, 0, 0, random_call(0, 2))
    nodes[0].run()
    with pytest.raises(ReplyError, match="payload type mismatch: the message says FLOAT32, this node has INT8"):
        collect(remote)


@pytest.mark.parametrize(("senders", "nodes"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (1, 5)])
@pytest.mark.parametrize("spare", [0.0, 0.7])
def test_sums_equal_a_local_computation(senders: int, nodes: int, spare: float) -> None:
    remotes, servers = exchange(place(SPEC, nodes, spare), senders)
    for layer in range(len(SPEC.layers)):
        calls = {}
        for sender, remote in enumerate(remotes):
            for lane in range(2):
                call = calls[sender, lane] = random_call(layer, 1 + 4 * lane + sender, seed=10 * sender + lane)
                remote.dispatch(lane, step=0, clock=layer, call=call)
                assert remote.pending[lane].call is call, "kept until answered"
        for server in servers:
            server.run()
        for sender, remote in enumerate(remotes):
            assert sorted(collect(remote)) == [0, 1]
            for lane in range(2):
                call = calls[sender, lane]
                expected = weighted_sum(SPEC, layer, call.x_TH, call.experts_TK, call.weights_TK)
                torch.testing.assert_close(remote.finish(lane).total(), expected, rtol=1e-5, atol=1e-5)
            assert not remote.pending
    assert [server.refused for server in servers] == [[]] * nodes


def test_a_token_goes_once_to_each_node_that_it_needs_and_others_hear_nothing() -> None:
    # With three nodes, layer 2 puts expert e on node (e + 2) % 3.
    (remote,), servers = exchange(place(SPEC, 3))
    remote.dispatch(0, step=0, clock=0, call=call_with([[1, 4, 2], [2, 5, 4], [1, 4, 5]]))
    heard = []
    for server in servers:
        frame = server.links[0].receive()
        heard.append(None if frame is None else (frame.header.tokens, frame.header.picks))
        assert server.links[0].receive() is None
    assert heard == [(3, 3), (3, 3), None]
    remote.dispatch(1, step=0, clock=0, call=call_with([[1, 4, 2], [0, 3, 1], [0, 3, 4]]))
    assert [f.header.tokens if (f := server.links[0].receive()) else None for server in servers] == [3, 1, 2]


def test_partial_sums_are_added_in_the_order_of_nodes_not_of_answers() -> None:
    (remote,), servers = exchange(place(SPEC, 3))
    totals = []
    for step, order in enumerate((sorted, lambda nodes: sorted(nodes, reverse=True))):
        remote.dispatch(0, step=step, clock=0, call=random_call(2, 50))
        for server in servers:
            server.run()
        assert collect(remote, order) == [0]
        totals.append(remote.finish(0).total())
    assert torch.equal(*totals)


def test_a_layer_is_complete_only_when_all_nodes_have_answered() -> None:
    (remote,), servers = exchange(place(SPEC, 2))
    remote.dispatch(0, step=0, clock=5, call=random_call(1, 8))
    servers[1].run()
    assert collect(remote) == [] and not remote.pending[0].complete
    servers[0].run()
    assert collect(remote) == [0]
    assert remote.clock_floor == 5


WRONG_REPLIES = {
    "kind": ({"kind": Kind.DISPATCH}, "kind mismatch: the message says 1, this node has 2"),
    "sender": ({"sender": 7}, r"sender \(lane 0, layer 1\) mismatch: the message says 7, this node has 0"),
    "step": ({"step": 5}, r"step \(lane 0, layer 1\) mismatch: the message says 5, this node has 4"),
    "layer": ({"layer": 2}, r"layer \(lane 0, layer 1\) mismatch: the message says 2, this node has 1"),
    "epoch": ({"epoch": 4}, r"epoch \(lane 0, layer 1\) mismatch: the message says 4, this node has 3"),
    "tokens": ({"tokens": 7}, r"tokens \(lane 0, layer 1\) mismatch: the message says 7, this node has 8"),
    "hidden": ({"hidden": 16}, r"hidden \(lane 0, layer 1\) mismatch: the message says 16, this node has 32"),
    "payload": (
        {"payload": PayloadType.BFLOAT16},
        r"payload \(lane 0, layer 1\) mismatch: the message says 2, .* has 1",
    ),
    "fingerprint": ({"fingerprint": 5}, rf"fingerprint .* mismatch: the message says 5, this node has {FINGERPRINT}"),
    "size": ({"payload_bytes": 64}, r"payload size mismatch: 1024 bytes arrived, the header says 64, .* needs 1024"),
}


@pytest.mark.parametrize("name", WRONG_REPLIES)
def test_a_reply_that_does_not_answer_what_was_sent_names_lane_and_both_values(name: str) -> None:
    changes, fault = WRONG_REPLIES[name]
    (remote,), servers = exchange(place(SPEC, 1))
    remote.dispatch(0, step=4, clock=0, call=random_call(1, 8))
    servers[0].run()
    (frame,) = frames(remote, 0)
    with pytest.raises(ReplyError, match=fault) as caught:
        remote.accept(0, Frame(replace(frame.header, **changes), frame.payload))
    assert caught.value.lane == 0
    assert remote.accept(0, frame) == 0, "the right answer is still good"


def test_a_refusal_is_passed_on_with_the_nodes_name_and_words() -> None:
    placement = place(SPEC, 1)
    (remote,), servers = exchange(placement)
    remote.dispatch(0, step=4, clock=0, call=random_call(1, 3))
    servers[0].run()
    collect(remote)
    remote.finish(0)
    remote.dispatch(0, step=4, clock=0, call=random_call(0, 3))
    servers[0].run()
    (frame,) = frames(remote, 0)
    with pytest.raises(
        ReplyError, match=r"ffn-0 refused layer 0: .* says step 4 layer 0, .* served its step 4 layer 1"
    ):
        remote.accept(0, frame)


def test_a_second_answer_is_an_error() -> None:
    (remote,), servers = exchange(place(SPEC, 2))
    remote.dispatch(0, step=0, clock=0, call=random_call(1, 8))
    for server in servers:
        server.run()
    (frame,) = frames(remote, 1)
    assert remote.accept(1, frame) is None
    with pytest.raises(ReplyError, match="ffn-1 answered lane 0, layer 1 twice"):
        remote.accept(1, frame)


def test_a_reply_about_nothing_under_way_is_no_lanes_error() -> None:
    (remote,), servers = exchange(place(SPEC, 2))
    remote.dispatch(0, step=0, clock=0, call=call_with([[0, 2, 4]]))
    for server in servers:
        server.run()
    (frame,) = frames(remote, 0)
    for node, header in ((0, replace(frame.header, lane=3)), (1, frame.header)):
        with pytest.raises(ProtocolError, match=rf"lane {header.lane}, layer 2, but nothing is under way") as caught:
            remote.accept(node, Frame(header, frame.payload))
        assert not isinstance(caught.value, ReplyError)


def test_late_replies_of_an_abandoned_step_are_dropped_and_the_next_step_works() -> None:
    (remote,), servers = exchange(place(SPEC, 2))
    remote.dispatch(0, step=6, clock=0, call=random_call(1, 8))
    servers[0].run()
    assert collect(remote) == []
    remote.abandon(0, 6)
    assert not remote.pending
    call = random_call(0, 5, seed=2)
    remote.dispatch(0, step=7, clock=0, call=call)
    for server in servers:
        server.run()
    # Node 1 answers the abandoned layer first, then, if it was asked, the new one.
    assert collect(remote) == [0]
    expected = weighted_sum(SPEC, 0, call.x_TH, call.experts_TK, call.weights_TK)
    torch.testing.assert_close(remote.finish(0).total(), expected, rtol=1e-5, atol=1e-5)


def test_one_lane_has_one_layer_under_way() -> None:
    (remote,), _ = exchange(place(SPEC, 1))
    remote.dispatch(0, step=0, clock=0, call=random_call(1, 1))
    with pytest.raises(AssertionError, match="lane 0 already waits"):
        remote.dispatch(0, step=0, clock=0, call=random_call(2, 1))


def test_the_header_says_what_the_message_is() -> None:
    (remote,), servers = exchange(place(SPEC, 1))
    remote.dispatch(2, step=11, clock=35, call=random_call(1, 8))
    frame = servers[0].links[0].receive()
    assert frame is not None
    size = frame.header.payload_bytes
    assert frame.header == Header(
        Kind.DISPATCH, PayloadType.FLOAT32, 0, 2, 1, 3, 11, 8, 32, 3, size, 35, FINGERPRINT, busy_us=0, flags=0
    )
