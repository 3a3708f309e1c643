"""Where a text ends: stop strings across tokens, stop tokens, end-of-text, and what of them is shown."""

from itertools import accumulate
from typing import Any

import pytest

from tests.serving.reference import Reference
from tests.serving.server import Server
from tests.serving.wire import CHAT

PROMPT = "Once upon a time"
TOKENS = 24


@pytest.fixture(scope="module")
def readable(reference: Reference) -> list[int]:
    return reference.readable_ids()


@pytest.fixture(scope="module")
def text(shared_server: Server, readable: list[int]) -> str:
    """A greedy text of readable tokens, without any stop."""
    text = shared_server.text(PROMPT, max_tokens=TOKENS, allowed_token_ids=readable)
    assert len(text) > TOKENS, text
    return text


def both(server: Server, **body: Any) -> dict[str, Any]:
    """The first choice, which must be the same whole and streamed."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS, **body}
    whole = server.complete(**body)["choices"][0]
    pieces = [event["choices"][0] for event in server.stream(**body)]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    last = pieces[-1]
    assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    assert all(piece["finish_reason"] is None for piece in pieces[:-1])
    return whole


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_stop_strings_cut_exactly_wherever_tokens_meet(
    server: Server, text: str, readable: list[int], length: int
) -> None:
    for start in range(0, len(text) - length, 5):
        stop = text[start : start + length]
        cut = text.find(stop)
        choice = both(server, stop=stop, allowed_token_ids=readable)
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:cut], "stop", stop)


def test_of_several_stops_the_first_that_is_complete_wins(server: Server, text: str, readable: list[int]) -> None:
    late, early, never = text[20:26], text[9:12], "#never#"
    ends = {stop: text.find(stop) + len(stop) for stop in (late, early)}
    first = min(ends, key=lambda stop: ends[stop])
    choice = both(server, stop=[never, late, early], allowed_token_ids=readable)
    assert (choice["text"], choice["stop_reason"]) == (text[: ends[first] - len(first)], first)


def test_a_beginning_of_a_stop_string_is_sent_when_it_turns_out_to_be_text(
    server: Server, text: str, readable: list[int]
) -> None:
    choice = both(server, stop=[text[-3:] + "#", text[5:9] + "#"], allowed_token_ids=readable)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "length", None)


def test_include_stop_str_in_output_keeps_the_string(server: Server, text: str, readable: list[int]) -> None:
    stop = text[7:12]
    choice = both(server, stop=stop, allowed_token_ids=readable, include_stop_str_in_output=True)
    assert choice["text"] == text[: text.find(stop) + len(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_chat_stops_alike(server: Server, reference: Reference, readable: list[int]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "allowed_token_ids": readable}
    text = server.chat(**body, max_tokens=TOKENS)["choices"][0]["message"]["content"]
    stop = text[6:10]
    choice = server.chat(**body, max_tokens=TOKENS, stop=[stop])["choices"][0]
    assert choice["message"]["content"] == text[: text.find(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    deltas = [event["choices"][0]["delta"] for event in server.stream(CHAT, **body, max_tokens=TOKENS, stop=[stop])]
    assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]


def test_a_stop_string_costs_no_more_tokens_than_it_needs(
    server: Server, reference: Reference, text: str, readable: list[int]
) -> None:
    stop = text[7:12]
    answer = server.complete(prompt=PROMPT, temperature=0, max_tokens=TOKENS, allowed_token_ids=readable, stop=stop)
    scored = server.complete(prompt=PROMPT, temperature=0, max_tokens=TOKENS, allowed_token_ids=readable, logprobs=0)
    ends = accumulate(len(token) for token in scored["choices"][0]["logprobs"]["tokens"])
    needed = next(count for count, end in enumerate(ends, start=1) if end >= text.find(stop) + len(stop))
    assert answer["usage"]["completion_tokens"] == needed


def test_stop_token_ids_end_the_text(server: Server, reference: Reference) -> None:
    made = reference.greedy(reference.ids(PROMPT), TOKENS)
    for place in (0, 3, 10):
        token = made[place]
        end = made.index(token)
        choice = both(server, stop_token_ids=[token, 0])
        assert choice["text"] == reference.text(made[:end])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
        choice = both(server, stop_token_ids=[token], include_stop_str_in_output=True)
        assert choice["text"] == reference.text(made[: end + 1])


def test_end_of_text_is_no_text_unless_shown_and_kept(server: Server, reference: Reference) -> None:
    bias = {"logit_bias": {str(reference.eos): 100}}
    shown = {"skip_special_tokens": False}
    kept = {"include_stop_str_in_output": True}
    mark = reference.text([reference.eos], skip_special_tokens=False)
    for options, text in (({}, ""), (shown, ""), (kept, ""), ({**shown, **kept}, mark)):
        choice = both(server, **bias, **options)
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", None)


def test_ignore_eos_goes_on(server: Server, reference: Reference) -> None:
    bias = {"logit_bias": {str(reference.eos): 100}, "ignore_eos": True, "max_tokens": 5}
    mark = reference.text([reference.eos], skip_special_tokens=False)
    choice = both(server, **bias)
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert both(server, **bias, skip_special_tokens=False)["text"] == mark * 5
    assert server.complete(prompt=PROMPT, **bias)["usage"]["completion_tokens"] == 5
    # A token that is named as a stop ends the text all the same.
    choice = both(server, **bias, stop_token_ids=[reference.eos])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reference.eos)


def test_special_tokens_are_shown_where_asked(server: Server, reference: Reference) -> None:
    start = reference.ids("<|im_start|>")[0]
    force = {"logit_bias": {str(start): 100}, "max_tokens": 3}
    assert both(server, **force)["text"] == ""
    assert both(server, **force, skip_special_tokens=False)["text"] == "<|im_start|>" * 3


def test_no_stop_before_min_tokens(server: Server, reference: Reference) -> None:
    """Matching begins with the text after min_tokens tokens."""
    (letter,) = reference.ids("a")
    force = {"logit_bias": {str(letter): 100}, "max_tokens": 10}
    assert both(server, **force, stop="aa")["text"] == ""
    assert both(server, **force, stop="aa", min_tokens=4)["text"] == "aaaa"
    kept = both(server, **force, stop="aa", min_tokens=4, include_stop_str_in_output=True)
    assert kept["text"] == "aaaaaa"
    # A stop token cannot be drawn before: here the second best comes instead.
    choice = both(server, **force, stop_token_ids=[letter], min_tokens=3)
    assert len(choice["text"]) > 0 and (choice["finish_reason"], choice["stop_reason"]) == ("stop", letter)
    answer = server.complete(prompt=PROMPT, **force, stop_token_ids=[letter], min_tokens=3)
    assert answer["usage"]["completion_tokens"] == 4


def test_a_stop_string_may_have_characters_of_several_tokens(server: Server, reference: Reference) -> None:
    drawing = {"temperature": 100, "max_tokens": 60, "allowed_token_ids": reference.ids("ď")}
    bodies = [{**drawing, "seed": seed} for seed in range(10)]
    body, whole = next((body, text) for body in bodies if "ď" in (text := both(server, **body)["text"])[1:])
    place = whole.find("ď")
    choice = both(server, **body, stop=["ď"])
    assert (choice["text"], choice["stop_reason"]) == (whole[:place], "ď")
    # Bytes that are no character are text too, by the mark that stands for them.
    assert both(server, **body, stop="\ufffd")["text"] == whole[: whole.find("\ufffd")]


def test_a_stop_string_may_be_a_special_tokens_text(server: Server, reference: Reference) -> None:
    start, (letter,) = reference.ids("<|im_start|>")[0], reference.ids("a")
    body = {"allowed_token_ids": [start, letter], "frequency_penalty": 2, "skip_special_tokens": False}
    whole = both(server, **body)["text"]
    assert whole.count("<|im_start|>") > 1 and "a" in whole
    assert both(server, **body, stop="im_start|>a")["text"] == whole[: whole.find("im_start|>a")]
    hidden = both(server, **{**body, "skip_special_tokens": True}, stop="im_start|>a")
    assert (hidden["text"], hidden["finish_reason"]) == (whole.replace("<|im_start|>", ""), "length")
