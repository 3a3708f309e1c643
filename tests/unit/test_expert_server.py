"""The FFN node's server over in-process links: merged results, loud refusals, true counts.

Legend: T tokens, K picks, H hidden.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_cluster import FINGERPRINT, FfnNode, expert_layers, ffn_node, linked, place, tiny_spec
from torch import Tensor

from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.header import Header, Kind, PayloadType
from moe_runtime.protocol.payload import error_text, payload_size, reply_part
from moe_runtime.transport.base import Link

SPEC = tiny_spec()
PLACEMENT = place(SPEC, 2, spare=0.5)
NODE = 0
LAYER = 1


def server_with_links(count: int) -> tuple[FfnNode, list[Link]]:
    node, near_ends = ffn_node(SPEC, PLACEMENT, NODE), []
    for index in range(count):
        near, far = linked(index, NODE)
        node.links.append(far)
        near_ends.append(near)
    return node, near_ends


def call_parts(layer: int, tokens: int, seed: int) -> list[Tensor]:
    """Random tokens whose picks are on this node, with some picks elsewhere (-1); no token picks one slot twice."""
    generator = torch.Generator().manual_seed(seed)
    here = torch.from_numpy(PLACEMENT.layers[layer].slots_on(NODE))
    picks = SPEC.layers[layer].ffn.picks
    order_TS = torch.rand(tokens, len(here) + picks - 1, generator=generator).argsort(-1)[:, :picks]
    slots_TK = torch.cat([here, torch.full((picks - 1,), -1)])[order_TS].int()
    return [
        torch.randn(tokens, SPEC.hidden, generator=generator),
        slots_TK,
        torch.rand(tokens, picks, generator=generator),
    ]


def header_of(layer: int, parts: list[Tensor], sender: int = 0, lane: int = 0, step: int = 0, clock: int = 0) -> Header:
    return Header(
        Kind.DISPATCH,
        PayloadType.FLOAT32,
        sender,
        lane,
        layer,
        PLACEMENT.epoch,
        step,
        tokens=len(parts[0]),
        hidden=SPEC.hidden,
        picks=parts[1].shape[1],
        payload_bytes=payload_size(parts),
        clock=clock,
        fingerprint=FINGERPRINT,
    )


def expected(layer: int, parts: list[Tensor]) -> Tensor:
    return expert_layers(SPEC, PLACEMENT, NODE)[layer](*parts)


@pytest.mark.parametrize("layer", range(len(SPEC.layers)))
def test_messages_of_one_layer_are_merged_and_each_gets_its_own_result(layer: int) -> None:
    node, links = server_with_links(2)
    messages = [(link, lane, call_parts(layer, 3 + 2 * lane + sender, seed=10 * sender + lane))
                for sender, link in enumerate(links) for lane in range(2)]  # fmt: skip
    for (link, lane, parts), clock in zip(messages, (40, 30, 20, 50), strict=True):
        link.send(header_of(layer, parts, links.index(link), lane, step=lane + 7, clock=clock), parts)
    node.hear()
    assert node.work() and not node.work(), "all four in one call"
    for link, lane, parts in messages:
        frame = link.receive()
        assert frame is not None
        reply = frame.header
        assert (reply.kind, reply.sender, reply.lane) == (Kind.REPLY, links.index(link), lane)
        assert (reply.step, reply.layer, reply.tokens) == (lane + 7, layer, len(parts[0]))
        assert (reply.epoch, reply.fingerprint) == (PLACEMENT.epoch, FINGERPRINT)
        assert reply.clock == 20, "the least progress of any lane that it knows of"
        torch.testing.assert_close(reply_part(frame, torch.float32), expected(layer, parts), rtol=1e-5, atol=1e-5)
    assert [link.receive() for link in links] == [None, None]


def test_a_reply_tells_the_least_progress_queued_or_just_served() -> None:
    node, (link,) = server_with_links(1)
    for lane, clock in enumerate((20, 50)):
        parts = call_parts(lane, 1, seed=lane)
        link.send(header_of(lane, parts, lane=lane, clock=clock), parts)
    node.hear()
    told = []
    while node.work():
        frame = link.receive()
        assert frame is not None
        told.append(frame.header.clock)
    assert told == [20, 50]


def foreign_slot(parts: list[Tensor]) -> None:
    parts[1][1, 0] = int(PLACEMENT.layers[LAYER].slots_on(1)[0])


def missing_slot(parts: list[Tensor]) -> None:
    parts[1][0, 1] = 77


def change(**fields: object) -> Callable[[Header], Header]:
    return lambda header: replace(header, **fields)  # type: ignore[arg-type]


WRONG_HEADERS = {
    "kind": (change(kind=Kind.REPLY), r"kind mismatch: the message says 2, this node has 1"),
    "layer": (change(layer=9), r"layer mismatch: the message says 9, this model has 0\.\.2"),
    "epoch": (change(epoch=2), r"placement epoch mismatch: the message says 2, this node has 3"),
    "fingerprint": (change(fingerprint=5), rf"fingerprint mismatch: the message says 5, this node has {FINGERPRINT}"),
    "sender": (change(sender=4), r"sender mismatch: the message says 4, this node has 0"),
    "hidden": (change(hidden=33), r"hidden size mismatch: the message says 33, this node has 32"),
    "picks": (change(picks=4), r"picks per token mismatch: the message says 4, this node has 3"),
    "payload": (change(payload=PayloadType.BFLOAT16), r"type mismatch: the message says BFLOAT16, this node has FLOAT"),
    "no tokens": (change(tokens=0), r"token count mismatch: the message says 0, an empty message must not be sent"),
    "too many tokens": (change(tokens=400), r"payload size mismatch: \d+ bytes arrived, .* its shape needs \d+"),
    "an old step": (change(step=4), r"lane 0 says step 4 layer 1, but this node has served its step 5 layer 0"),
    "the same step and layer": (change(layer=0, picks=1), r"step 5 layer 0, but this node has served its step 5 layer"),
}
WRONG_SLOTS = {
    "foreign": (foreign_slot, r"slot \d+ is not on this node, which holds \[.*\]"),
    "out of range": (missing_slot, r"slot id 77 does not exist: this layer has slots 0\.\.10"),
}


def assert_refused_and_serving(header: Header, parts: list[Tensor], fault: str) -> None:
    """The wrong message gets an error; a right one, of the same step and layer too, is still answered."""
    node, (link, other) = server_with_links(2)
    first, good = call_parts(0, 2, seed=1), call_parts(LAYER, 5, seed=2)
    link.send(header_of(0, first, step=5), first)
    node.run()
    assert link.receive() is not None
    link.send(header, parts)
    other.send(header_of(LAYER, good, sender=1), good)
    link.send(header_of(LAYER, good, step=5), good)
    node.run()
    with pytest.raises(ProtocolError, match=fault):
        raise ProtocolError(*node.refused)
    refusal = link.receive()
    assert refusal is not None and error_text(refusal) == node.refused[0]
    assert replace(refusal.header, kind=header.kind, payload_bytes=header.payload_bytes) == header
    assert refusal.header.kind is Kind.ERROR
    for end in (link, other):
        frame = end.receive()
        assert frame is not None and frame.header.kind is Kind.REPLY
        torch.testing.assert_close(reply_part(frame, torch.float32), expected(LAYER, good), rtol=1e-5, atol=1e-5)
    assert node.server.load.tokens[LAYER].sum() == 2 * int((good[1] >= 0).sum()), "what was refused is not counted"


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_a_header_that_does_not_match_is_refused_with_both_values(name: str) -> None:
    wrong, fault = WRONG_HEADERS[name]
    parts = call_parts(LAYER, 3, seed=3)
    assert_refused_and_serving(wrong(header_of(LAYER, parts, step=5)), parts, fault)


@pytest.mark.parametrize("name", WRONG_SLOTS)
def test_a_slot_that_is_not_here_is_refused_by_its_id(name: str) -> None:
    spoil, fault = WRONG_SLOTS[name]
    parts = call_parts(LAYER, 3, seed=3)
    spoil(parts)
    assert_refused_and_serving(header_of(LAYER, parts, step=5), parts, fault)


def test_lanes_and_links_progress_on_their_own() -> None:
    node, links = server_with_links(2)
    for sender, lane, step, layer in [(0, 0, 9, 2), (0, 1, 3, 0), (1, 0, 0, 0), (0, 1, 3, 2), (1, 0, 0, 1)]:
        parts = call_parts(layer, 1, seed=step)
        links[sender].send(header_of(layer, parts, sender, lane, step), parts)
        node.run()
    assert node.refused == []


def test_load_counts_each_pick_once_by_logical_expert() -> None:
    node, links = server_with_links(2)
    counted = [np.zeros(experts.total, dtype=np.int64) for experts in SPEC.experts]
    for step in range(4):
        for layer in range(len(SPEC.layers)):
            for sender, link in enumerate(links):
                parts = call_parts(layer, 1 + step + sender, seed=step + 10 * sender)
                link.send(header_of(layer, parts, sender, step=step), parts)
                expert_of_slot = PLACEMENT.layers[layer].expert_of_slot_S
                for slot in parts[1].flatten().tolist():
                    if slot >= 0:
                        counted[layer][expert_of_slot[slot]] += 1
            node.run()
    for layer, counts in enumerate(counted):
        assert counts.sum() > 0
        assert node.server.load.tokens[layer].tolist() == counts.tolist()
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in node.server.load.samples()}
    rows = sum(2 * (1 + step) + 1 for step in range(4))
    for layer, counts in enumerate(counted):
        label = ("layer", str(layer))
        assert samples["ffn_messages_total", (label,)] == 8
        assert samples["ffn_calls_total", (label,)] == 4, "both nodes' messages met in one call"
        assert samples["ffn_tokens_total", (label,)] == rows
        for expert, count in enumerate(counts.tolist()):
            assert samples.get(("expert_tokens_total", (("expert", str(expert)), label)), 0) == count


def test_a_link_that_died_is_reported_and_the_others_are_answered() -> None:
    node, (link, other) = server_with_links(2)
    parts = call_parts(LAYER, 3, seed=4)
    link.send(header_of(LAYER, parts), parts)
    other.send(header_of(LAYER, parts, sender=1), parts)
    node.hear()
    link.close()
    assert node.server.serve() == [node.links[0]]
    assert other.receive() is not None


def test_what_a_forgotten_link_asked_for_is_not_computed() -> None:
    node, (link, other) = server_with_links(2)
    parts = call_parts(LAYER, 3, seed=4)
    link.send(header_of(LAYER, parts), parts)
    other.send(header_of(LAYER, parts, sender=1), parts)
    node.hear()
    node.server.forget(node.links[0])
    assert node.work() and not node.work()
    assert link.receive() is None and other.receive() is not None
    assert node.server.load.tokens[LAYER].sum() == int((parts[1] >= 0).sum())
