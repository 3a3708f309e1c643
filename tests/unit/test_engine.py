"""The engine end to end in one thread: whatever the topology, lanes, chunks, pool and interleaving, the same text.

The yardstick is the plain whole-sequence forward of moe_runtime.models.reference.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from tiny_cluster import (
    AttentionNode,
    Cluster,
    Sizes,
    expert_layers,
    ffn_node,
    place,
    reference_text,
    split_cluster,
    tiny_spec,
    unsplit_node,
)
from torch import Tensor

from attention_nodes.scheduling.request import Request
from moe_runtime.errors import LinkTimeoutError, ProtocolError
from moe_runtime.protocol.header import Header, Kind, PayloadType
from moe_runtime.protocol.messages import SamplingParams
from moe_runtime.protocol.payload import Frame
from moe_runtime.transport.base import Link

SPEC = tiny_spec()
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = {f"p{i}": [(7 * i * i + 13 * j + i) % SPEC.vocab for j in range(1 + (5 * i) % 17)] for i in range(10)}


@cache
def greedy_texts() -> dict[str, list[int]]:
    return {name: reference_text(SPEC, prompt, GREEDY.max_tokens) for name, prompt in PROMPTS.items()}


def submit_all(cluster: Cluster, sampling: SamplingParams = GREEDY) -> dict[str, Request]:
    """Every prompt, attention nodes in turn."""
    nodes = cluster.attention
    return {
        name: nodes[i % len(nodes)].submit(name, prompt, sampling) for i, (name, prompt) in enumerate(PROMPTS.items())
    }


def texts(cluster: Cluster) -> dict[str, list[int]]:
    return {name: [t for node in cluster.attention for t in node.tokens_of(name)] for name in PROMPTS}


def assert_idle_and_whole(cluster: Cluster) -> None:
    for node in cluster.attention:
        assert node.engine.drained and not node.engine.in_flight and not node.engine.has_ready
        assert node.pool.free == node.pool.total
        assert all(link.receive() is None for link in node.links.values())
    assert all(len(node.server.queue) == 0 for node in cluster.ffn)


def unsplit(sizes: Sizes = Sizes()) -> Cluster:  # noqa: B008  (frozen)
    return Cluster([unsplit_node(SPEC, sizes)], [])


def test_the_prompts_make_varied_texts() -> None:
    assert len({tuple(text) for text in greedy_texts().values()}) == len(PROMPTS)
    assert len({token for text in greedy_texts().values() for token in text}) > 20


@pytest.mark.parametrize("batch_tokens", [7, 64])
def test_unsplit_equals_the_plain_forward(batch_tokens: int) -> None:
    cluster = unsplit(Sizes(batch_tokens=batch_tokens))
    submit_all(cluster)
    cluster.drain()
    assert texts(cluster) == greedy_texts()
    assert_idle_and_whole(cluster)


@pytest.mark.parametrize("topology", [(1, 1), (1, 2), (2, 1), (2, 3)], ids=lambda mn: f"{mn[0]}A{mn[1]}F")
@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("batch_tokens", [7, 64])
def test_split_equals_the_plain_forward(topology: tuple[int, int], lanes: int, batch_tokens: int) -> None:
    cluster = split_cluster(SPEC, Sizes(lanes=lanes, batch_tokens=batch_tokens), *topology, spare=0.5)
    submit_all(cluster)
    cluster.drain()
    assert texts(cluster) == greedy_texts()
    assert_idle_and_whole(cluster)
    for name in PROMPTS:
        outputs = [output for node in cluster.attention for output in node.outputs_of(name)]
        assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("batch_tokens", [7, 64])
def test_a_pool_so_small_that_requests_are_preempted_changes_no_text(lanes: int, batch_tokens: int) -> None:
    sizes = Sizes(lanes=lanes, batch_tokens=batch_tokens, blocks=26, block_size=1)
    cluster = split_cluster(SPEC, sizes, ffn=2)
    submit_all(cluster)
    cluster.drain()
    assert cluster.attention[0].engine.scheduler.preemptions > 0
    assert texts(cluster) == greedy_texts()
    assert_idle_and_whole(cluster)


@pytest.mark.parametrize("seed", range(6))
def test_any_interleaving_with_aborts_leaks_nothing_and_disturbs_nobody(seed: int) -> None:
    dice = random.Random(seed)
    sizes = Sizes(lanes=seed % 4 + 1, batch_tokens=9, blocks=30, block_size=1)
    cluster = split_cluster(SPEC, sizes, attention=2, ffn=2, spare=0.5)
    submit_all(cluster)
    victims, said = dice.sample(sorted(PROMPTS), 5), {}
    for victim in victims:
        for _ in range(dice.randrange(150)):
            cluster.shuffled_step(dice)
        for node in cluster.attention:
            node.engine.scheduler.abort(victim)
        said[victim] = texts(cluster)[victim]
    cluster.drain(dice)
    for name, text in texts(cluster).items():
        assert text == (said[name] if name in victims else greedy_texts()[name])
    assert any(len(said[victim]) < GREEDY.max_tokens for victim in victims)
    assert_idle_and_whole(cluster)


SAMPLED = SamplingParams(max_tokens=8, temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, seed=5)


def test_sampled_text_is_the_same_alone_in_any_batch_after_preemption_and_in_any_topology() -> None:
    alone = {}
    for name, prompt in PROMPTS.items():
        cluster = unsplit()
        cluster.attention[0].submit(name, prompt, SAMPLED)
        cluster.drain()
        alone[name] = cluster.attention[0].tokens_of(name)
    assert alone != greedy_texts()
    crowds = [
        unsplit(),
        unsplit(Sizes(blocks=26, block_size=1)),
        split_cluster(SPEC, Sizes(lanes=2, batch_tokens=7), ffn=3, spare=0.5),
        split_cluster(SPEC, Sizes(lanes=4, blocks=26, block_size=1), attention=1),
        split_cluster(SPEC, Sizes(lanes=1), attention=3, ffn=2),
    ]
    for cluster in crowds:
        submit_all(cluster, SAMPLED)
        cluster.drain()
        assert texts(cluster) == alone
    assert crowds[1].attention[0].engine.scheduler.preemptions > 0


def test_requests_that_resume_elsewhere_go_on_with_the_same_text() -> None:
    whole = unsplit().attention[0]
    whole.submit("x", PROMPTS["p3"], SAMPLED)
    Cluster([whole], []).drain()
    text = whole.tokens_of("x")
    other = split_cluster(SPEC, Sizes(), ffn=2)
    other.attention[0].submit("x", [*PROMPTS["p3"], *text[:3]], SAMPLED, resumed=3)
    other.drain()
    assert other.attention[0].tokens_of("x") == text[3:]


def test_a_stop_token_ends_the_text_with_its_reason() -> None:
    text = greedy_texts()["p3"]
    stop = text[4]
    cluster = unsplit()
    cluster.attention[0].submit("p3", PROMPTS["p3"], SamplingParams(8, temperature=0.0, stop_token_ids=(stop,)))
    cluster.drain()
    outputs = cluster.attention[0].outputs_of("p3")
    assert [output.token_ids for output in outputs] == [(token,) for token in text[: text.index(stop) + 1]]
    assert [output.finish_reason for output in outputs][-1] == "stop"


class Tampered(Link):
    """A link whose reply number `at` arrives with other header fields."""

    def __init__(self, link: Link, at: int, changes: dict[str, object]) -> None:
        self._link, self._left, self._changes = link, at, changes
        self.peer, self.peer_index, self.transport = link.peer, link.peer_index, link.transport

    def receive(self) -> Frame | None:
        frame = self._link.receive()
        if frame is None:
            return None
        self._left -= 1
        return Frame(replace(frame.header, **self._changes), frame.payload) if self._left == 0 else frame

    def fileno(self) -> int:
        return self._link.fileno()

    def send(self, header: Header, parts: Sequence[Tensor]) -> None:
        self._link.send(header, parts)

    def close(self) -> None:
        self._link.close()


def tamper(node: AttentionNode, ffn: int, at: int, changes: dict[str, object]) -> None:
    node.links[ffn] = Tampered(node.links[ffn], at, changes)


WRONG = {
    "step": ({"step": 77}, "step .* mismatch: the message says 77, this node has \\d"),
    "layer": ({"layer": 8}, "layer .* mismatch: the message says 8, this node has"),
    "epoch": ({"epoch": 9}, "epoch .* mismatch: the message says 9, this node has 3"),
    "tokens": ({"tokens": 99}, "tokens .* mismatch: the message says 99, this node has"),
    "hidden": ({"hidden": 31}, "hidden .* mismatch: the message says 31, this node has 32"),
    "sender": ({"sender": 3}, "sender .* mismatch: the message says 3, this node has 0"),
    "fingerprint": ({"fingerprint": 1}, "fingerprint .* mismatch: the message says 1, this node has"),
    "payload": ({"payload": PayloadType.BFLOAT16}, "payload .* mismatch"),
    "kind": ({"kind": Kind.DISPATCH}, "kind mismatch"),
    "refusal": ({"kind": Kind.ERROR}, r"ffn-\d refused layer"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(("ffn", "shuffle"), [(0, None), (1, None), (0, 1), (1, 2)])
def test_a_wrong_reply_fails_its_lanes_requests_only(name: str, ffn: int, shuffle: int | None) -> None:
    """Node 0 is heard first, so that its wrong reply leaves node 1's to come late."""
    changes, fault = WRONG[name]
    cluster = split_cluster(SPEC, Sizes(lanes=2), ffn=2)
    (node,) = cluster.attention
    # Both lanes have five requests each; the reply belongs to an early step of one of them.
    tamper(node, ffn, at=2 * 2 * len(SPEC.layers) + 1, changes=changes)
    submit_all(cluster)
    cluster.drain(None if shuffle is None else random.Random(shuffle))
    failed = {failure.request_id for failure in node.failures}
    assert len(failed) == 5
    for failure in node.failures:
        assert failure.kind == "internal"
        with pytest.raises(ProtocolError, match=fault):
            raise ProtocolError(failure.message)
    assert node.engine.metrics.failed_steps.value == 1
    for request_id, text in texts(cluster).items():
        expected = greedy_texts()[request_id]
        assert text == (expected[: len(text)] if request_id in failed else expected)
        assert (len(text) < len(expected)) == (request_id in failed)
    assert_idle_and_whole(cluster)
    # The lane goes on: the same prompts, asked again, all come out right.
    node.answers.clear()
    submit_all(cluster)
    cluster.drain()
    assert texts(cluster) == greedy_texts()
    assert_idle_and_whole(cluster)


def test_a_node_with_another_epoch_fails_requests_with_both_epochs_and_the_engine_lives() -> None:
    cluster = split_cluster(SPEC, Sizes(lanes=2), ffn=2)
    stale = ffn_node(SPEC, place(SPEC, 2), 1, epoch=2)
    stale.links, good = cluster.ffn[1].links, cluster.ffn[1]
    cluster.ffn[1] = stale
    submit_all(cluster)
    cluster.drain()
    (node,) = cluster.attention
    assert {failure.request_id for failure in node.failures} == set(PROMPTS)
    assert all("epoch mismatch: the message says 3, this node has 2" in failure.message for failure in node.failures)
    assert_idle_and_whole(cluster)
    cluster.ffn[1] = good
    submit_all(cluster)
    cluster.drain()
    assert texts(cluster) == greedy_texts()


def test_aborted_requests_of_a_failed_step_are_not_answered() -> None:
    cluster = split_cluster(SPEC, Sizes(lanes=1, batch_tokens=256), ffn=2)
    (node,) = cluster.attention
    tamper(node, ffn=1, at=1, changes={"step": 50})
    submit_all(cluster)
    node.engine.start_idle_lanes()
    assert node.engine.scheduler.abort("p4")
    cluster.drain()
    assert {failure.request_id for failure in node.failures} == set(PROMPTS) - {"p4"}
    assert_idle_and_whole(cluster)


def test_an_overdue_reply_is_named_with_lane_layer_and_silent_nodes() -> None:
    cluster = split_cluster(SPEC, Sizes(lanes=2), ffn=3)
    (node,) = cluster.attention
    submit_all(cluster)
    for _ in range(3):
        node.engine.start_idle_lanes()
        node.engine.run_ready()
        for quick in (cluster.ffn[0], cluster.ffn[2]):
            quick.run()
        node.hear()
    node.engine.check_replies(timeout_s=60.0)
    with pytest.raises(
        LinkTimeoutError, match=r"no reply for lane \d, layer \d from ffn-1 after .*reply_timeout_s is 0"
    ):
        node.engine.check_replies(timeout_s=0.0)


def test_lanes_run_on_their_own_clocks_and_a_late_one_joins_at_its_peers_progress() -> None:
    cluster = split_cluster(SPEC, Sizes(lanes=2), ffn=1)
    (node,) = cluster.attention
    node.submit("p1", PROMPTS["p1"], GREEDY)
    for _ in range(8):
        cluster.step()
    early = node.engine._lanes[0].clock
    assert early > 3 and node.engine._lanes[1].idle
    node.submit("p2", PROMPTS["p2"], GREEDY)
    node.engine.start_idle_lanes()
    assert early - 1 <= node.engine._lanes[1].clock <= early + 1
    cluster.drain()
    assert_idle_and_whole(cluster)


def test_gauges_and_counters_tell_what_happened() -> None:
    cluster = split_cluster(SPEC, Sizes(lanes=2), ffn=2)
    (node,) = cluster.attention
    submit_all(cluster)
    for _ in range(6):
        cluster.step()
    metrics = node.engine.metrics
    node.engine.refresh_gauges()
    assert metrics.running.value == 10 and metrics.waiting.value == 0
    assert metrics.kv_blocks_held.value == node.pool.total - node.pool.free > 0
    assert metrics.kv_usage.value == metrics.kv_blocks_held.value / node.pool.total
    cluster.drain()
    node.engine.refresh_gauges()
    assert metrics.running.value == metrics.kv_blocks_held.value == metrics.kv_usage.value == 0
    assert metrics.generated.value == 80 and metrics.failed_steps.value == 0
    prompt_tokens = sum(map(len, PROMPTS.values()))
    assert metrics.step_tokens.value == prompt_tokens + 10 * 7, "the last token of a text is never fed back"
    rows = sum(sum(load.server.load._rows) for load in cluster.ffn)
    assert rows >= metrics.step_tokens.value * len(SPEC.layers)


def test_every_expert_is_used_so_that_a_missing_one_would_show() -> None:
    cluster = split_cluster(SPEC, Sizes(), ffn=2)
    submit_all(cluster)
    cluster.drain()
    for layer, experts in enumerate(SPEC.experts):
        counts = sum(node.server.load.tokens[layer] for node in cluster.ffn)
        assert len(counts) == experts.total and (counts > 0).all()
    assert sum(layer.nbytes for node in (0, 1) for layer in expert_layers(SPEC, place(SPEC, 2), node)) > 0
