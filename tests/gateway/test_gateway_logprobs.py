"""Scores in both endpoints' shapes, whole and streamed, with echo and without; and JSON that stays JSON."""

import math
import random
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, MESSAGES, MODEL, both, stream, whole
from conftest import Cluster
from fake_engine import Answer
from tiny_tokenizer import EOS, TOKENIZER, VOCAB, ids

from moe_runtime.protocol.messages import TokenScore

(A, B, HASH) = ids("ab#")


def says(cluster: Cluster, tokens: list[int], finish: str | None = "length", per_step: int = 1) -> None:
    steps = [tuple(tokens[start : start + per_step]) for start in range(0, len(tokens), per_step)]
    cluster.script(lambda submit: Answer(steps, finish))


def test_completions_shape(cluster: Cluster) -> None:
    says(cluster, [A, *ids("€"), B, EOS], "stop")
    (choice,) = both(cluster, COMPLETIONS, prompt="x", logprobs=2)
    logprobs = choice["logprobs"]
    first, second, third = ids("€")
    assert choice["text"] == "a€b"
    assert logprobs["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"]
    assert logprobs["token_logprobs"] == [-token / 16 for token in (A, first, second, third, B)]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    names = [TOKENIZER.decode([A - 2]), TOKENIZER.decode([A - 1])]
    assert logprobs["top_logprobs"][0] == {names[0]: 0.0, names[1]: -0.25, "a": -A / 16}
    assert len(logprobs["top_logprobs"]) == 5


def test_logprobs_0_has_the_token_itself(cluster: Cluster) -> None:
    says(cluster, [A])
    (choice,) = both(cluster, COMPLETIONS, prompt="x", logprobs=0)
    assert choice["logprobs"]["top_logprobs"] == [{"a": -A / 16}]
    (chat,) = both(cluster, CHAT, messages=MESSAGES, logprobs=True)
    assert chat["logprobs"]["content"][0]["top_logprobs"] == []


def test_chat_shape(cluster: Cluster) -> None:
    says(cluster, [A, *ids("€"), EOS], "stop")
    (choice,) = both(cluster, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a€"
    best = TOKENIZER.decode([A - 2])
    assert content[0]["top_logprobs"][0] == {"token": best, "logprob": 0.0, "bytes": list(best.encode())}
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    assert content[0]["logprob"] == -A / 16


def test_the_openai_client_reads_them(cluster: Cluster) -> None:
    says(cluster, [A, B])
    completion = cluster.openai.completions.create(model=MODEL, prompt="x", logprobs=1).choices[0]
    assert completion.logprobs is not None and completion.logprobs.tokens == ["a", "b"]
    chat = cluster.openai.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1)  # type: ignore[arg-type]
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "b"] and logprobs.content[0].bytes == [97]
    chunks = cluster.openai.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, stream=True)  # type: ignore[call-overload]
    entries = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content]
    assert [entry.token for entry in entries] == ["a", "b"]


def test_without_logprobs_there_are_none(cluster: Cluster) -> None:
    assert both(cluster, COMPLETIONS, prompt="x", max_tokens=2)[0]["logprobs"] is None
    assert both(cluster, CHAT, messages=MESSAGES, max_tokens=2)[0]["logprobs"] is None


def test_scores_wait_for_their_text(cluster: Cluster) -> None:
    """Held with an unfinished character, and with what may begin a stop string."""
    says(cluster, ids("a€#b##"), None)
    chunks = [c["choices"][0] for c in stream(cluster, COMPLETIONS, prompt="x", logprobs=0, stop="##")]
    seen = [(chunk["text"], len(chunk["logprobs"]["tokens"]) if chunk["logprobs"] else 0) for chunk in chunks]
    assert seen == [("a", 1), ("€", 3), ("#b", 2), ("", 0)]
    assert chunks[-1]["stop_reason"] == "##"


@pytest.mark.parametrize("per_step", [1, 2, 3, 50])
@pytest.mark.parametrize("include", [False, True])
def test_what_a_stop_string_cuts_has_no_scores(cluster: Cluster, per_step: int, include: bool) -> None:
    says(cluster, ids("ab##cd"), None, per_step)
    body = {"logprobs": 1, "stop": "##", "include_stop_str_in_output": include}
    (choice,) = both(cluster, COMPLETIONS, prompt="x", **body)
    assert choice["logprobs"]["tokens"] == list("ab##" if include else "ab")


def test_the_token_that_ends_the_text_has_a_score_only_if_it_is_included(cluster: Cluster) -> None:
    says(cluster, [A, HASH], "stop")
    for include, tokens in ((False, ["a"]), (True, ["a", "#"])):
        body = {"logprobs": 1, "stop_token_ids": [HASH], "include_stop_str_in_output": include}
        (choice,) = both(cluster, COMPLETIONS, prompt="x", **body)
        assert choice["logprobs"]["tokens"] == tokens


def test_special_tokens_inside_the_text_have_scores(cluster: Cluster) -> None:
    says(cluster, [EOS, A, EOS, B, EOS], "length")
    for skip, text, offsets in ((True, "ab", [0, 0, 1, 1, 2]), (False, "<|im_end|>".join(["", "a", "b", ""]), None)):
        body = {"logprobs": 0, "ignore_eos": True, "skip_special_tokens": skip}
        (choice,) = both(cluster, COMPLETIONS, prompt="x", **body)
        assert choice["text"] == text
        assert choice["logprobs"]["tokens"] == ["<|im_end|>", "a", "<|im_end|>", "b", "<|im_end|>"]
        assert choice["logprobs"]["text_offset"] == (offsets or [0, 10, 11, 21, 22])


def test_nothing_but_end_of_text_has_no_scores(cluster: Cluster) -> None:
    says(cluster, [EOS], "stop")
    (choice,) = both(cluster, COMPLETIONS, prompt="x", logprobs=1)
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert both(cluster, CHAT, messages=MESSAGES, logprobs=True)[0]["logprobs"] == {"content": [], "refusal": None}


IMPOSSIBLE = [-math.inf, math.nan, -1e30, -9999.5]


@pytest.mark.parametrize("logprob", IMPOSSIBLE)
def test_what_json_cannot_say_is_a_very_low_number(cluster: Cluster, logprob: float) -> None:
    score = TokenScore(logprob, VOCAB, ((A, -0.5), (B, logprob)))
    cluster.script(lambda submit: Answer([(A,), (B,)], score=lambda token, top: score))
    body = {"prompt": "xy", "logprobs": 2, "echo": True, "top_k": 1, "prompt_logprobs": 2}
    choice = whole(cluster, COMPLETIONS, **body)["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0, -9999.0, -9999.0]
    assert choice["logprobs"]["top_logprobs"][3] == {"a": -0.5, "b": -9999.0}
    assert choice["prompt_logprobs"][1][str(ids("y")[0])]["logprob"] == -9999.0
    (chat,) = both(cluster, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert [entry["logprob"] for entry in chat["logprobs"]["content"]] == [-9999.0, -9999.0]


def test_prompt_logprobs_of_completions(cluster: Cluster) -> None:
    _, y, z = ids("xyz")
    body = {"prompt": ["xyz", "a"], "prompt_logprobs": 1, "n": 2, "max_tokens": 1}
    choices = whole(cluster, COMPLETIONS, **body)["choices"]

    def entry(token: int) -> dict[str, Any]:
        best = token - 2
        return {
            str(token): {"logprob": -token / 16, "rank": token + 1, "decoded_token": TOKENIZER.decode([token])},
            str(best): {"logprob": 0.0, "rank": 1, "decoded_token": TOKENIZER.decode([best])},
        }

    assert [choice["prompt_logprobs"] for choice in choices] == [[None, entry(y), entry(z)]] * 2 + [[None]] * 2
    assert choices[0]["logprobs"] is None
    assert list(choices[0]["prompt_logprobs"][1]) == [str(y), str(y - 2)]


def test_prompt_logprobs_of_chats_stand_beside_the_choices(cluster: Cluster) -> None:
    body = whole(cluster, CHAT, messages=MESSAGES, prompt_logprobs=0, n=2, max_tokens=1)
    prompt = cluster.submitted[0].prompt_ids
    assert len(body["prompt_logprobs"]) == len(prompt) and body["prompt_logprobs"][0] is None
    assert [list(entry) for entry in body["prompt_logprobs"][1:]] == [[str(token)] for token in prompt[1:]]
    assert "prompt_logprobs" not in body["choices"][0]
    assert "prompt_logprobs" not in whole(cluster, CHAT, messages=MESSAGES, max_tokens=1)


def test_echo_puts_the_prompt_first(cluster: Cluster) -> None:
    prompts: list[Any] = ["ab€", ids("ab€")]
    for prompt in prompts:
        for n in (1, 2):
            choices = both(cluster, COMPLETIONS, prompt=prompt, echo=True, n=n, max_tokens=2)
            assert [choice["text"] for choice in choices] == ["ab€ab"] * n
    choices = both(cluster, COMPLETIONS, prompt=["ab", "cd"], echo=True, max_tokens=0)
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("ab", "length"), ("cd", "length")]
    assert {submit.sampling.max_tokens for submit in cluster.submitted} == {0, 2}


def test_echo_with_logprobs_scores_the_prompt(cluster: Cluster) -> None:
    for max_tokens in (0, 2):
        (choice,) = both(cluster, COMPLETIONS, prompt="x€yyyy", echo=True, logprobs=1, max_tokens=max_tokens)
        prompt = ids("x€yyyy")
        tokens = [*prompt, *prompt[:max_tokens]]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, *(-token / 16 for token in tokens[1:])]
        assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"][1]) == 2
        assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3, 4, 5, 6, 7][: len(tokens)]
        assert choice["text"] == "x€yyyy" + ("x\ufffd" if max_tokens else "")


def test_every_field_shows_as_many_as_it_asked_for(cluster: Cluster) -> None:
    """The engine reports the most that one of them wants."""
    body = {"prompt": "xyz", "echo": True, "logprobs": 1, "prompt_logprobs": 4, "max_tokens": 1}
    (choice,) = whole(cluster, COMPLETIONS, **body)["choices"]
    assert {submit.sampling.prompt_logprobs for submit in cluster.submitted} == {4}
    assert [len(entry or ()) for entry in choice["prompt_logprobs"]] == [0, 4, 4]  # the token is among the four
    assert [len(entry or ()) for entry in choice["logprobs"]["top_logprobs"]] == [0, 2, 2, 2]
    body = {**body, "logprobs": 4, "prompt_logprobs": 1}
    (choice,) = whole(cluster, COMPLETIONS, **body)["choices"]
    assert [len(entry or ()) for entry in choice["prompt_logprobs"]] == [0, 2, 2]
    assert [len(entry or ()) for entry in choice["logprobs"]["top_logprobs"]] == [0, 4, 4, 4]


def test_an_echoed_text_is_the_clients_own(cluster: Cluster) -> None:
    """Special tokens in it are shown as they were given; truncated, it is what the model was given."""
    text = "<|im_start|>a<|im_end|>b"
    (choice,) = both(cluster, COMPLETIONS, prompt=text, echo=True, logprobs=0, max_tokens=0)
    assert choice["text"] == text
    assert choice["logprobs"]["tokens"] == ["<|im_start|>", "a", "<|im_end|>", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 12, 13, 23]
    body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0, "truncate_prompt_tokens": 2}
    (choice,) = both(cluster, COMPLETIONS, **body)
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("b", [0, 0])
    (choice,) = both(cluster, COMPLETIONS, **body, skip_special_tokens=False)
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<|im_end|>b", [0, 10])


def test_stop_strings_are_not_looked_for_in_the_echo(cluster: Cluster) -> None:
    says(cluster, ids("c#d"), None)
    (choice,) = both(cluster, COMPLETIONS, prompt="a#b#", echo=True, logprobs=0, stop="#")
    assert choice["text"] == "a#b#c" and choice["logprobs"]["tokens"] == list("a#b#c")


def test_a_refusal_before_the_echo_keeps_its_status(cluster: Cluster) -> None:
    cluster.script(lambda submit: Answer([], failure=("overloaded", "full")))
    body = {"prompt": "abcdefgh", "echo": True, "logprobs": 1, "stream": True}
    assert cluster.http.post(COMPLETIONS, json=body).status_code == 429


def test_a_long_prompt_with_scores_comes_whole(cluster: Cluster) -> None:
    """More entries than are written on the event loop."""
    body = {"prompt": ["ab" * 190] * 4, "echo": True, "logprobs": 20, "prompt_logprobs": 20, "max_tokens": 1}
    choices = whole(cluster, COMPLETIONS, **body)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [380] * 4
    body = {"prompt": "ab" * 190, "echo": True, "logprobs": 20, "max_tokens": 5}
    assert len(both(cluster, COMPLETIONS, **body)[0]["logprobs"]["tokens"]) == 385


TEXTS = ["ab##cd", "€#€##", "x" * 12, "a\u0301b", "🦙🦙#", "#", "日本語##x"]


@pytest.mark.parametrize("seed", range(12))
def test_any_combination_streams_to_the_whole(cluster: Cluster, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(8):
        tokens = [*ids(draw.choice(TEXTS)), *draw.choice([[], [EOS], ids("€")[:1]]), *ids(draw.choice(TEXTS))]
        stops = draw.choice([False, True])
        says(cluster, [*tokens, EOS] if stops else tokens, "stop" if stops else "length", draw.randint(1, 5))
        body: dict[str, Any] = {
            "n": draw.randint(1, 3),
            "stop": draw.choice([[], ["##"], ["€", "##"], ["zz", "\ufffd"]]),
            "include_stop_str_in_output": draw.choice([False, True]),
            "skip_special_tokens": draw.choice([False, True]),
            "min_tokens": draw.choice([0, 0, 2, 5]),
            "max_tokens": 64,
        }
        completion = {
            **body,
            "prompt": draw.choice(["p", ["abc", "€"], [ids("q#€")[:-1], ids("abcdefg")]]),
            "echo": draw.choice([False, True]),
            "logprobs": draw.choice([None, 0, 3]),
        }
        for choice in both(cluster, COMPLETIONS, **completion):
            if completion["logprobs"] is not None:
                offsets = choice["logprobs"]["text_offset"]
                assert offsets == sorted(offsets) and (not offsets or offsets[-1] <= len(choice["text"]))
        both(cluster, CHAT, messages=MESSAGES, **body, logprobs=draw.choice([False, True]))


def test_scores_do_not_depend_on_how_tokens_are_grouped(cluster: Cluster) -> None:
    seen = []
    for per_step in (1, 2, 3, 5, 50):
        says(cluster, [*ids("a€b#c"), EOS, *ids("###d")], None, per_step)
        seen.append(both(cluster, COMPLETIONS, prompt="x", logprobs=2, stop="###", ignore_eos=True))
    assert all(choices == seen[0] for choices in seen)
