"""Where a text ends and what of its end is shown: stop strings, stop tokens, special tokens, minimum lengths."""

from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, MESSAGES, both, stream
from conftest import Cluster
from fake_engine import Answer
from tiny_tokenizer import EOS, ids

START = EOS - 1  # <|im_start|>, another special token
(HASH,) = ids("#")
PER_STEP = pytest.mark.parametrize("per_step", [1, 2, 100])


def says(cluster: Cluster, tokens: list[int], finish: str | None = "stop", per_step: int = 1) -> None:
    steps = [tuple(tokens[start : start + per_step]) for start in range(0, len(tokens), per_step)]
    cluster.script(lambda submit: Answer(steps, finish))


def ending(cluster: Cluster, **body: Any) -> tuple[str, str, Any]:
    """Text, finish_reason and stop_reason, the same in both endpoints, whole and streamed."""
    (choice,) = both(cluster, COMPLETIONS, prompt="x", **body)
    (chat,) = both(cluster, CHAT, messages=MESSAGES, **body)
    assert chat["message"] == {"role": "assistant", "content": choice["text"], "refusal": None}
    assert (chat["finish_reason"], chat["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    return choice["text"], choice["finish_reason"], choice["stop_reason"]


@PER_STEP
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string(cluster: Cluster, per_step: int, include: bool) -> None:
    says(cluster, ids("ab<<END>>cd"), None, per_step)
    body = {"stop": ["never", "<END>", "ND>>"], "include_stop_str_in_output": include}
    assert ending(cluster, **body) == ("ab<" + ("<END>" if include else ""), "stop", "<END>")


@PER_STEP
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_has_its_id_as_the_reason(cluster: Cluster, per_step: int, include: bool) -> None:
    says(cluster, ids("ab#"), "stop", per_step)
    text = "ab#" if include else "ab"
    body = {"stop_token_ids": [HASH], "include_stop_str_in_output": include}
    assert ending(cluster, **body) == (text, "stop", HASH)


@PER_STEP
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_end_of_text_has_no_reason_and_text_only_if_special_tokens_have(
    cluster: Cluster, per_step: int, include: bool, skip: bool
) -> None:
    says(cluster, [*ids("a"), START, *ids("b"), EOS], "stop", per_step)
    text = "ab" if skip else "a<|im_start|>b" + ("<|im_end|>" if include else "")
    body = {"include_stop_str_in_output": include, "skip_special_tokens": skip}
    assert ending(cluster, **body) == (text, "stop", None)


def test_end_of_text_that_the_request_names_is_a_stop_token(cluster: Cluster) -> None:
    says(cluster, [*ids("a"), EOS])
    assert ending(cluster, stop_token_ids=[EOS]) == ("a", "stop", EOS)


def test_the_length_has_no_reason(cluster: Cluster) -> None:
    says(cluster, ids("a"), "length")
    assert ending(cluster, max_tokens=1, stop_token_ids=[HASH], stop="#") == ("a", "length", None)


def test_an_ignored_end_of_text_is_one_more_token(cluster: Cluster) -> None:
    says(cluster, [*ids("a"), EOS, *ids("b#")])
    body = {"ignore_eos": True, "stop_token_ids": [HASH]}
    assert ending(cluster, **body) == ("ab", "stop", HASH)
    assert ending(cluster, **body, skip_special_tokens=False) == ("a<|im_end|>b", "stop", HASH)


def test_a_stop_string_may_be_made_of_special_tokens_text(cluster: Cluster) -> None:
    says(cluster, [*ids("a"), START, *ids("b")], None)
    assert ending(cluster, stop="start|>b", skip_special_tokens=False) == ("a<|im_", "stop", "start|>b")


@PER_STEP
def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(cluster: Cluster, per_step: int) -> None:
    says(cluster, ids("a#b#c#d"), None, per_step)
    expected = {0: "a", 1: "a", 2: "a#b", 3: "a#b", 4: "a#b#c"}
    for min_tokens, text in expected.items():
        assert ending(cluster, stop="#", min_tokens=min_tokens) == (text, "stop", "#")


def test_a_stop_string_that_begins_within_min_tokens_does_not_count(cluster: Cluster) -> None:
    says(cluster, ids("abcabc"), None)
    assert ending(cluster, stop="bc", min_tokens=2) == ("abca", "stop", "bc")


def test_a_character_that_ends_after_min_tokens_can_be_a_stop_string(cluster: Cluster) -> None:
    says(cluster, ids("a€b"), None)
    assert ending(cluster, stop="€", min_tokens=3) == ("a", "stop", "€")
    says(cluster, ids("a€b"), "length")
    assert ending(cluster, stop="€", min_tokens=4) == ("a€b", "length", None)


def test_no_beginning_of_a_stop_string_is_sent(cluster: Cluster) -> None:
    says(cluster, ids("one STO two STOP"), None)
    sent = ""
    for chunk in stream(cluster, COMPLETIONS, prompt="x", stop="STOP"):
        sent += chunk["choices"][0]["text"]
        assert not sent.endswith(("S", "ST", "STO")) or "STO " in sent
    assert sent == "one STO two "


def test_with_the_stop_string_included_nothing_is_held_back(cluster: Cluster) -> None:
    says(cluster, ids("aSTOP"), None)
    chunks = stream(cluster, COMPLETIONS, prompt="x", stop="STOP", include_stop_str_in_output=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list("aSTOP")


def test_an_unfinished_character_before_the_end(cluster: Cluster) -> None:
    half = ids("€")[:2]
    says(cluster, [*ids("a"), *half, EOS])
    assert ending(cluster) == ("a\ufffd", "stop", None)
    shown = ending(cluster, skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown == ("a\ufffd<|im_end|>", "stop", None)
    says(cluster, [*ids("a"), *half], "length")
    assert ending(cluster, stop="\ufffd") == ("a", "stop", "\ufffd")
