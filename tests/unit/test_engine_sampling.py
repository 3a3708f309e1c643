"""Sampling parameters through the whole engine: scores, penalties, masks and faults, whatever the chunks, the pool and
the topology.
"""

import math
import random
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_cluster import (
    AttentionNode,
    Cluster,
    Sizes,
    reference_logprobs,
    reference_text,
    split_cluster,
    tiny_spec,
    unsplit_node,
)
from torch import Tensor

from attention_nodes.decoding import finish
from attention_nodes.decoding.outcome import NONE_LEFT, NOT_FINITE
from attention_nodes.scheduling.request import Request
from moe_runtime.protocol.messages import RequestFailed, SamplingParams, TokenOutput, TokenScore

SPEC = tiny_spec()
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
EVERYTHING = SamplingParams(
    max_tokens=12,
    temperature=1.3,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    seed=5,
    stop_token_ids=(1, 2),
    min_tokens=12,
    presence_penalty=0.8,
    frequency_penalty=1.2,
    repetition_penalty=1.4,
    logit_bias=tuple((token, 3.0) for token in range(10, 30)),
    bad_words=((11,), (12, 13), (14, 15, 16), *((token, token) for token in range(96))),
    allowed_token_ids=tuple(range(1, 60)),
    logprobs=3,
    prompt_logprobs=2,
)
# Penalties that only a wrong count would make forget what the text already has.
PENALISED = SamplingParams(max_tokens=10, temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
PROMPTS = {f"p{i}": [(11 * i * i + 17 * j + i) % SPEC.vocab for j in range(2 + (5 * i) % 17)] for i in range(8)}
TIGHT = Sizes(batch_tokens=5, blocks=32, block_size=1)


def one_node(sizes: Sizes = Sizes()) -> Cluster:  # noqa: B008  (frozen)
    return Cluster([unsplit_node(SPEC, sizes)], [])


def run(cluster: Cluster, sampling: SamplingParams, names: Sequence[str] = tuple(PROMPTS)) -> AttentionNode:
    (node,) = cluster.attention
    for name in names:
        node.submit(name, PROMPTS[name], sampling)
    cluster.drain()
    assert_whole(cluster)
    return node


def assert_whole(cluster: Cluster) -> None:
    for node in cluster.attention:
        assert node.engine.drained and node.pool.free == node.pool.total


def prompt_scores(node: AttentionNode, name: str) -> list[TokenScore]:
    return [score for output in node.outputs_of(name) for score in output.prompt_scores]


def scores(node: AttentionNode, name: str) -> list[TokenScore]:
    return [score for output in node.outputs_of(name) for score in output.scores]


def assert_scores(ours: Sequence[TokenScore], tokens: Sequence[int], logprobs_TV: Tensor, best: int) -> None:
    """Row i of logprobs_TV predicts token i. Ranks and best tokens are compared by their log-probabilities, as two of
    them may be within rounding.
    """
    assert len(ours) == len(tokens) == len(logprobs_TV)
    for score, token, logprobs_V in zip(ours, tokens, logprobs_TV, strict=True):
        ordered_V = logprobs_V.sort(descending=True).values
        assert score.logprob == pytest.approx(float(logprobs_V[token]), abs=1e-4)
        assert score.logprob == pytest.approx(float(ordered_V[score.rank - 1]), abs=1e-4)
        assert [p for _, p in score.top] == pytest.approx(ordered_V[:best].tolist(), abs=1e-4)
        assert [p for _, p in score.top] == pytest.approx([float(logprobs_V[t]) for t, _ in score.top], abs=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 2, 3, 5, 8, 17, 64])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_scores_equal_the_plain_forward_whatever_the_chunks(batch_tokens: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens, temperature=0.0, prompt_logprobs=3)
    node = run(one_node(Sizes(batch_tokens=batch_tokens, blocks=120)), params)
    for name, prompt in PROMPTS.items():
        assert_scores(prompt_scores(node, name), prompt[1:], reference_logprobs(SPEC, prompt)[:-1], best=3)
        outputs = node.outputs_of(name)
        first = next(i for i, output in enumerate(outputs) if output.token_ids or output.finish_reason)
        assert all(not output.prompt_scores for output in outputs[first:])
        assert [output.finish_reason for output in outputs][-1] == "length"
        assert node.tokens_of(name) == reference_text(SPEC, prompt, max_tokens)


def test_prompt_scores_over_two_ffn_nodes_and_lanes() -> None:
    params = SamplingParams(0, prompt_logprobs=1)
    node = run(split_cluster(SPEC, Sizes(lanes=2, batch_tokens=7), ffn=2), params)
    for name, prompt in PROMPTS.items():
        assert_scores(prompt_scores(node, name), prompt[1:], reference_logprobs(SPEC, prompt)[:-1], best=1)


def test_the_head_sees_few_rows_at_once_and_only_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "_BLOCK_ROWS", 4)
    cluster = one_node()
    (node,) = cluster.attention
    seen: list[int] = []
    head = node.engine._model.logits
    monkeypatch.setattr(node.engine._model, "logits", lambda x_PH: (seen.append(len(x_PH)), head(x_PH))[1])
    node.submit("plain", PROMPTS["p3"], SamplingParams(2, temperature=0.0))
    node.submit("scored", PROMPTS["p2"], SamplingParams(1, temperature=0.0, prompt_logprobs=0))
    node.submit("unasked", PROMPTS["p1"], SamplingParams(0))
    batch = node.engine.scheduler.schedule()
    assert batch is not None and batch.head_rows == 2 + len(PROMPTS["p2"]) - 1
    node.engine.scheduler.abort_all(batch)
    node.submit("plain", PROMPTS["p3"], SamplingParams(2, temperature=0.0))
    node.submit("scored", PROMPTS["p2"], SamplingParams(1, temperature=0.0, prompt_logprobs=0))
    node.submit("unasked", PROMPTS["p1"], SamplingParams(0))
    cluster.drain()
    assert seen == [2, *[4] * ((len(PROMPTS["p2"]) - 1) // 4), (len(PROMPTS["p2"]) - 1) % 4, 1]


def watched(cluster: Cluster, requests: Sequence[Request]) -> Iterator[Request]:
    """Run to the end; gives requests that were preempted after some, but not all of their prompt was scored."""
    for _ in range(5000):
        if all(node.engine.drained for node in cluster.attention):
            return
        before = [request.preemptions for request in requests]
        cluster.step()
        for request, preemptions in zip(requests, before, strict=True):
            if request.preemptions > preemptions and 1 < request.prompt_scored < request.generated_from:
                yield request
    raise AssertionError("the cluster does not come to an end")


def test_preemption_changes_no_text_and_no_score_and_repeats_none() -> None:
    whole, cluster = run(one_node(), EVERYTHING), one_node(TIGHT)
    (node,) = cluster.attention
    requests = [node.submit(name, prompt, EVERYTHING) for name, prompt in PROMPTS.items()]
    cut = list(watched(cluster, requests))
    assert_whole(cluster)
    assert cut, "no request was preempted in the middle of its prompt"
    assert any(r.preemptions and r.generated > 1 for r in requests)
    for name, prompt in PROMPTS.items():
        text = node.tokens_of(name)
        assert text == whole.tokens_of(name) and len(text) == 12
        logprobs_TV = reference_logprobs(SPEC, [*prompt, *text])
        assert_scores(prompt_scores(node, name), prompt[1:], logprobs_TV[: len(prompt) - 1], best=2)
        assert_scores(scores(node, name), text, logprobs_TV[len(prompt) - 1 : -1], best=3)


@pytest.mark.parametrize("params", [EVERYTHING, PENALISED], ids=["everything", "penalised"])
def test_text_is_the_same_alone_in_any_batch_and_in_any_topology(params: SamplingParams) -> None:
    alone = {name: run(one_node(), params, [name]).tokens_of(name) for name in PROMPTS}
    assert len(set(map(tuple, alone.values()))) == len(PROMPTS)
    neighbours = {"greedy": GREEDY, "penalised": PENALISED, "sampled": SamplingParams(9, min_p=0.1, logprobs=0)}
    for cluster in (
        one_node(),
        one_node(TIGHT),
        split_cluster(SPEC, Sizes(lanes=2, batch_tokens=7), ffn=3, spare=0.5),
    ):
        (node,) = cluster.attention
        for name, prompt in PROMPTS.items():
            node.submit(name, prompt, params)
            for kind, other in neighbours.items():
                node.submit(f"{name} beside {kind}", prompt, other)
        cluster.drain()
        assert {name: node.tokens_of(name) for name in PROMPTS} == alone
        assert_whole(cluster)


@pytest.mark.parametrize("params", [EVERYTHING, PENALISED], ids=["everything", "penalised"])
def test_what_resumes_elsewhere_counts_its_own_tokens_as_generated(params: SamplingParams) -> None:
    text = run(one_node(), params, ["p3"]).tokens_of("p3")
    for done in (1, 4, 9):
        cluster = split_cluster(SPEC, Sizes(batch_tokens=4), ffn=2)
        (node,) = cluster.attention
        node.submit("p3", [*PROMPTS["p3"], *text[:done]], params, resumed=done)
        cluster.drain()
        assert node.tokens_of("p3") == text[done:]
        assert prompt_scores(node, "p3") == []


def test_penalties_keep_a_greedy_text_from_repeating() -> None:
    plain = run(one_node(), msgspec.structs.replace(GREEDY, max_tokens=30), ["p5"]).tokens_of("p5")
    params = SamplingParams(30, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    penalised = run(one_node(), params, ["p5"]).tokens_of("p5")
    assert len(set(plain)) < 20 and len(set(penalised)) == 30


def test_a_stop_token_cannot_end_the_text_before_min_tokens() -> None:
    text = reference_text(SPEC, PROMPTS["p2"], 8)
    stop = text[2]
    for min_tokens in (0, 2, 3, 6):
        params = SamplingParams(8, temperature=0.0, stop_token_ids=(stop,), min_tokens=min_tokens)
        said = run(one_node(), params, ["p2"]).tokens_of("p2")
        assert stop not in said[:min_tokens] and said[:2] == text[:2]
        assert len(said) >= min_tokens
        assert (said == text[:3]) == (min_tokens <= 2)


def test_a_prompt_alone_ends_without_a_token_beside_others() -> None:
    cluster = one_node(Sizes(batch_tokens=7))
    (node,) = cluster.attention
    for name, prompt in PROMPTS.items():
        node.submit(name, prompt, GREEDY)
        node.submit(f"{name} alone", prompt, SamplingParams(0))
    cluster.drain()
    assert_whole(cluster)
    for name, prompt in PROMPTS.items():
        assert node.outputs_of(f"{name} alone") == [TokenOutput(f"{name} alone", (), "length")]
        assert node.tokens_of(name) == reference_text(SPEC, prompt, 8)


class ThirdsInTurn:
    """A tiny grammar: token number i of the text must be i modulo 3; it ends after `length` tokens."""

    def __init__(self, length: int, accepted: Sequence[int] = ()) -> None:
        self.length, self.accepted = length, list(accepted)

    def allowed(self) -> NDArray[np.int32]:
        bits = np.zeros(96, np.uint8)
        if len(self.accepted) < self.length:
            bits[len(self.accepted) % 3 :: 3] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("sizes", [Sizes(), TIGHT], ids=["roomy", "preempted"])
@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_a_mask_is_told_each_token_once_and_rules_the_next(params: SamplingParams, sizes: Sizes) -> None:
    cluster = one_node(sizes)
    (node,) = cluster.attention
    masks = {name: ThirdsInTurn(99) for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        node.submit(name, prompt, params, mask=masks[name])
    cluster.drain()
    assert (node.engine.scheduler.preemptions > 0) == (sizes is TIGHT)
    for name, mask in masks.items():
        text = node.tokens_of(name)
        assert len(text) == params.max_tokens and mask.accepted == text
        assert [token % 3 for token in text] == [i % 3 for i in range(len(text))]
    other = one_node()
    text = node.tokens_of("p3")
    other.attention[0].submit("p3", [*PROMPTS["p3"], *text[:4]], params, resumed=4, mask=ThirdsInTurn(99, text[:4]))
    other.drain()
    assert other.attention[0].tokens_of("p3") == text[4:]


def poison(node: AttentionNode, token: int) -> None:
    """From now on everything that sees this token is not a number."""
    node.engine._model._weights.embed_VH[token] = math.nan


POISON = 95
assert not any(POISON in prompt for prompt in PROMPTS.values())


@pytest.mark.parametrize("split", [False, True], ids=["unsplit", "split"])
@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_a_nan_ends_its_own_request_and_nobody_elses(params: SamplingParams, split: bool) -> None:
    def build() -> Cluster:
        return split_cluster(SPEC, Sizes(lanes=2, batch_tokens=9), ffn=2) if split else one_node(TIGHT)

    params = msgspec.structs.replace(params, max_tokens=8, min_tokens=0, allowed_token_ids=tuple(range(3, 90)))
    whole, cluster = run(build(), params), build()
    (node,) = cluster.attention
    poison(node, POISON)
    for again in range(2):
        node.answers.clear()
        for i, (name, prompt) in enumerate(PROMPTS.items()):
            node.submit(name, prompt, params)
            if i % 2:
                node.submit(f"bad {name}", [*prompt, POISON, 7, 8, 9], params)
        cluster.drain()
        bad = [f"bad {name}" for i, name in enumerate(PROMPTS) if i % 2]
        failures = [RequestFailed(name, "internal", NOT_FINITE.message) for name in bad]
        assert sorted(node.failures, key=lambda failure: failure.request_id) == failures, again
        assert all(node.tokens_of(name) == whole.tokens_of(name) for name in PROMPTS)
        assert_whole(cluster)


def test_a_prompt_whose_scores_break_off_fails_there() -> None:
    cluster = one_node(Sizes(batch_tokens=4))
    (node,) = cluster.attention
    poison(node, POISON)
    node.submit("x", [1, 2, 3, 4, 5, 6, POISON, 7, 8, 9, 10], SamplingParams(0, prompt_logprobs=1))
    cluster.drain()
    assert [type(answer).__name__ for _, answer in node.answers] == ["TokenOutput", "RequestFailed"]
    assert len(prompt_scores(node, "x")) == 4 and node.failures[0].kind == "internal"
    assert_whole(cluster)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_cannot_go_on_fails_as_the_clients_fault(temperature: float) -> None:
    """No token at all, and after two tokens; neighbours and the engine go on."""
    cluster = one_node()
    (node,) = cluster.attention
    for again in range(2):
        node.answers.clear()
        params = SamplingParams(8, temperature=temperature, prompt_logprobs=0)
        node.submit("none", PROMPTS["p1"], msgspec.structs.replace(params, allowed_token_ids=()))
        node.submit("two", PROMPTS["p2"], params, mask=ThirdsInTurn(2))
        node.submit("stop", PROMPTS["p3"], SamplingParams(8, allowed_token_ids=(3,), stop_token_ids=(3,), min_tokens=1))
        node.submit("good", PROMPTS["p4"], GREEDY)
        cluster.drain()
        assert {failure.request_id for failure in node.failures} == {"none", "two", "stop"}, again
        assert {(failure.kind, failure.message) for failure in node.failures} == {("invalid", NONE_LEFT.message)}
        assert node.tokens_of("none") == [] and len(node.tokens_of("two")) == 2
        assert node.tokens_of("good") == reference_text(SPEC, PROMPTS["p4"], 8)
        assert_whole(cluster)


@pytest.mark.parametrize("seed", range(3))
def test_aborts_among_scored_and_broken_requests_leak_nothing(seed: int) -> None:
    dice = random.Random(seed)
    cluster = split_cluster(SPEC, Sizes(lanes=seed + 1, batch_tokens=9, blocks=34, block_size=1), ffn=2)
    (node,) = cluster.attention
    poison(node, POISON)
    for name, prompt in PROMPTS.items():
        node.submit(name, [*prompt, *([POISON] if dice.random() < 0.3 else [])], EVERYTHING)
    for name in dice.sample(sorted(PROMPTS), 4):
        for _ in range(dice.randrange(80)):
            cluster.shuffled_step(dice)
        node.engine.scheduler.abort(name)
    cluster.drain(dice)
    assert_whole(cluster)
    assert torch.isnan(node.engine._model._weights.embed_VH).any()
