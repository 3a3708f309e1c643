"""n choices per prompt: indices, seeds, one finish each, and usage that counts a prompt once."""

from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, MESSAGES, MODEL, both, joined, stream, whole
from conftest import Cluster
from fake_engine import Answer
from tiny_tokenizer import EOS, TOKENIZER, ids

from moe_runtime.protocol.messages import Submit


def by_seed(submit: Submit) -> Answer:
    """A text of its own for every seed, of a length of its own."""
    seed = submit.sampling.seed
    text = TOKENIZER.decode(list(submit.prompt_ids)) + f"<{seed}>" * (1 + seed % 3)
    return Answer([(token,) for token in [*ids(text), EOS]], "stop")


def test_choices_of_several_prompts_have_their_indices_and_seeds(cluster: Cluster) -> None:
    cluster.script(by_seed)
    choices = both(cluster, COMPLETIONS, prompt=["a", "b"], n=3, seed=7)
    texts = ["a<7><7>", "a<8><8><8>", "a<9>", "b<7><7>", "b<8><8><8>", "b<9>"]
    assert [choice["text"] for choice in choices] == texts
    assert [choice["index"] for choice in choices] == list(range(6))


def test_choices_of_a_chat(cluster: Cluster) -> None:
    cluster.script(lambda submit: Answer([(token,) for token in ids(str(submit.sampling.seed))]))
    choices = both(cluster, CHAT, messages=MESSAGES, n=4, seed=-2)
    assert [choice["message"]["content"] for choice in choices] == ["-2", "-1", "0", "1"]
    chunks = cluster.openai.chat.completions.create(model=MODEL, messages=MESSAGES, n=4, stream=True)  # type: ignore[call-overload]
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(finished) == [0, 1, 2, 3]


def test_seeds_wrap_around(cluster: Cluster) -> None:
    whole(cluster, COMPLETIONS, prompt="x", n=3, seed=2**63 - 2, max_tokens=1)
    assert sorted(submit.sampling.seed for submit in cluster.submitted) == [-(2**63), 2**63 - 2, 2**63 - 1]


def test_without_a_seed_every_choice_has_its_own(cluster: Cluster) -> None:
    whole(cluster, COMPLETIONS, prompt=["x", "x"], n=20, max_tokens=1)
    assert len({submit.sampling.seed for submit in cluster.submitted}) == 40


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_counts_every_prompt_once(cluster: Cluster, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": ["abc", "de"]} if path == COMPLETIONS else {"messages": MESSAGES}
    body = {**prompt, "n": 3, "max_tokens": 4}
    usage = whole(cluster, path, **body)["usage"]
    sizes = {submit.request_id: len(submit.prompt_ids) for submit in cluster.submitted}
    assert usage["prompt_tokens"] == sum(sizes.values()) // 3
    assert usage["completion_tokens"] == 4 * len(sizes)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    chunks = stream(cluster, path, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("include_usage", [False, True])
def test_continuous_usage_is_true_in_every_chunk(cluster: Cluster, path: str, include_usage: bool) -> None:
    cluster.says("ab€d", finish="stop")
    prompt: dict[str, Any] = {"prompt": "xyz"} if path == COMPLETIONS else {"messages": MESSAGES}
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    chunks = stream(cluster, path, **prompt, stream_options=options)
    tokens = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    # a, b, the euro sign with its third byte, d, end-of-text.
    expected = {COMPLETIONS: [1, 2, 5, 6, 7], CHAT: [0, 1, 2, 5, 6, 7]}[path]
    assert tokens == [*expected, *([7] if include_usage else [])]
    prompt_tokens = len(cluster.submitted[0].prompt_ids)
    assert all(
        chunk["usage"]["total_tokens"] == prompt_tokens + chunk["usage"]["completion_tokens"] for chunk in chunks
    )
    assert (chunks[-1]["choices"] == []) == include_usage


def test_continuous_usage_of_several_choices_is_theirs_together(cluster: Cluster) -> None:
    cluster.hold(False, step_s=0.002)
    options = {"continuous_usage_stats": True}
    chunks = stream(cluster, COMPLETIONS, prompt="ab", n=3, max_tokens=5, stream_options=options)
    tokens = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert tokens == list(range(1, 16)) and {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}


def test_usage_ends_with_the_stop_string(cluster: Cluster) -> None:
    """Tokens that a node sends beyond the cut, in the same message or later, are not the client's."""
    for per_step in (1, 4, 9):
        tokens = ids("ab#cdefgh")
        steps = [tuple(tokens[start : start + per_step]) for start in range(0, 9, per_step)]
        cluster.script(lambda submit, steps=steps: Answer(steps, None))  # type: ignore[misc]
        assert whole(cluster, COMPLETIONS, prompt="x", n=2, stop="#")["usage"]["completion_tokens"] == 6


def test_one_choice_ends_early_and_the_others_go_on(cluster: Cluster) -> None:
    cluster.script(lambda submit: Answer([(token,) for token in ids("a#b" if submit.sampling.seed == 5 else "abcd")]))
    choices = both(cluster, COMPLETIONS, prompt="x", n=3, seed=4, stop="#")
    assert [choice["text"] for choice in choices] == ["abcd", "a", "abcd"]
    assert [choice["stop_reason"] for choice in choices] == [None, "#", None]


def test_a_stream_of_many_choices_adds_up(cluster: Cluster) -> None:
    cluster.script(by_seed)
    streamed = joined(stream(cluster, COMPLETIONS, prompt="p", n=64, seed=0))
    assert [choice["text"] for choice in streamed] == ["p" + f"<{seed}>" * (1 + seed % 3) for seed in range(64)]
