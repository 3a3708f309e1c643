"""Log-probabilities are the model's own log-softmax, in every form they are asked for."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.answers import same, streamed_answer, whole_answer
from tests.serving.reference import Reference
from tests.serving.server import Server
from tests.serving.wire import CHAT, COMPLETIONS

# Longer than a step has tokens, so that its scores come from several steps.
LONG = "Each function returns a list of tuples; the first item is the key. Příliš 🦙 " * 2
PROMPTS = ("x y", LONG)
TOKENS = 12
TOLERANCE = 1e-3
# Everything that changes what is drawn; nothing of it may change a score.
DRAWN = {
    "temperature": 1.7,
    "top_p": 0.95,
    "top_k": 200,
    "min_p": 0.001,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.2,
    "logit_bias": {"300": 4, "40": -100},
    "bad_words": ["the"],
    "seed": 4,
    "ignore_eos": True,
}
kinds = pytest.mark.parametrize("options", [{"temperature": 0, "ignore_eos": True}, DRAWN], ids=["greedy", "drawn"])
prompts = pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long"])


def ids_of(reference: Reference, names: Sequence[str]) -> list[int]:
    """Token ids by the names that log-probabilities give them."""
    by_name = {reference.name(token): token for token in range(reference.vocab)}
    assert len(by_name) == reference.vocab, "two tokens of one name"
    return [by_name[name] for name in names]


def check_completion(
    reference: Reference, ids: Sequence[int], scores: dict[str, Any], first: int, top: int = 0
) -> None:
    """scores are those of ids[first:], each given what comes before it in ids."""
    assert scores["tokens"] == [reference.name(token) for token in ids[first:]]
    logprobs_TV = reference.logprobs(ids)
    for place, token in enumerate(ids[first:], start=first):
        given, best = scores["token_logprobs"][place - first], scores["top_logprobs"][place - first]
        if place == 0:
            assert given is None and best is None
            continue
        row_V = logprobs_TV[place - 1]
        assert given == pytest.approx(float(row_V[token]), abs=TOLERANCE)
        right = row_V.topk(top)
        expected = {reference.name(int(i)): float(v) for v, i in zip(right.values, right.indices, strict=True)}
        assert best == pytest.approx({**expected, reference.name(token): float(row_V[token])}, abs=TOLERANCE)


@prompts
@kinds
@pytest.mark.parametrize("top", [0, 4])
def test_completions(server: Server, reference: Reference, prompt: str, options: dict[str, Any], top: int) -> None:
    answer = server.complete(prompt=prompt, max_tokens=TOKENS, logprobs=top, **options)
    scores = answer["choices"][0]["logprobs"]
    made = ids_of(reference, scores["tokens"])
    assert len(made) == TOKENS and reference.text(made) == answer["choices"][0]["text"]
    ids = reference.ids(prompt) + made
    check_completion(reference, ids, scores, len(ids) - TOKENS, top)


@prompts
@kinds
def test_chats(server: Server, reference: Reference, prompt: str, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": prompt}]
    choice = server.chat(messages=messages, max_tokens=TOKENS, logprobs=True, top_logprobs=3, **options)["choices"][0]
    content = choice["logprobs"]["content"]
    made = ids_of(reference, [entry["token"] for entry in content])
    ids = reference.chat_ids(messages, add_generation_prompt=True) + made
    logprobs_TV = reference.logprobs(ids)
    for place, entry in enumerate(content, start=len(ids) - TOKENS):
        row_V = logprobs_TV[place - 1]
        best = row_V.topk(3)
        assert bytes(entry["bytes"]) == reference.token_bytes(ids[place])
        assert entry["logprob"] == pytest.approx(float(row_V[ids[place]]), abs=TOLERANCE)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert [one["token"] for one in entry["top_logprobs"]] == [reference.name(int(i)) for i in best.indices]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == choice["message"]["content"]


@prompts
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_scores_the_prompt_too(server: Server, reference: Reference, prompt: str, max_tokens: int) -> None:
    answer = server.complete(prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)
    choice = answer["choices"][0]
    ids = reference.ids(prompt)
    ids += reference.greedy(ids, max_tokens) if max_tokens else []
    assert choice["text"] == reference.text(ids)
    check_completion(reference, ids, choice["logprobs"], 0, top=2)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


@prompts
@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs(server: Server, reference: Reference, prompt: str, top: int) -> None:
    messages = [{"role": "user", "content": prompt}]
    chat = server.chat(messages=messages, prompt_logprobs=top, max_tokens=1)["prompt_logprobs"]
    completion = server.complete(prompt=prompt, prompt_logprobs=top, max_tokens=1)["choices"][0]["prompt_logprobs"]
    chat_ids = reference.chat_ids(messages, add_generation_prompt=True)
    for ids, scores in ((reference.ids(prompt), completion), (chat_ids, chat)):
        assert len(scores) == len(ids) and scores[0] is None
        for place, row_V in enumerate(reference.logprobs(ids)[:-1], start=1):
            token = ids[place]
            best = [int(i) for i in row_V.topk(top).indices]
            assert list(scores[place]) == [str(i) for i in dict.fromkeys([token, *best])]
            for key, score in scores[place].items():
                assert score["logprob"] == pytest.approx(float(row_V[int(key)]), abs=TOLERANCE)
                assert score["rank"] == 1 + int((row_V > row_V[int(key)]).sum())
                assert score["decoded_token"] == reference.name(int(key))


def test_offsets_say_where_a_tokens_text_begins(server: Server, reference: Reference) -> None:
    readable = reference.readable_ids()
    for echo in (False, True):
        body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "allowed_token_ids": readable, "echo": echo}
        choice = server.complete(**body, logprobs=0, temperature=0)["choices"][0]
        scores = choice["logprobs"]
        for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
        assert scores["text_offset"] == sorted(set(scores["text_offset"])) and scores["text_offset"][0] == 0


def test_what_ended_the_text_and_what_was_cut_has_no_score(server: Server, reference: Reference) -> None:
    readable = reference.readable_ids()
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "logprobs": 1}
    text = server.complete(**body, allowed_token_ids=readable)["choices"][0]["text"]
    stop = text[12:18]
    cut = server.complete(**body, allowed_token_ids=readable, stop=stop)["choices"][0]
    assert cut["text"] == text[: text.find(stop)]
    assert all(offset < len(cut["text"]) for offset in cut["logprobs"]["text_offset"])
    assert "".join(cut["logprobs"]["tokens"]).startswith(cut["text"])
    ended = server.complete(**body, logit_bias={str(reference.eos): 100}, min_tokens=3)
    assert ended["usage"]["completion_tokens"] == 4 and len(ended["choices"][0]["logprobs"]["tokens"]) == 3


@kinds
def test_streamed_scores_are_the_whole_ones_and_no_earlier_than_their_text(
    server: Server, options: dict[str, Any]
) -> None:
    usage = {"stream_options": {"include_usage": True}}
    for path, body in (
        (COMPLETIONS, {"prompt": LONG, "logprobs": 2, "echo": True}),
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "logprobs": True, "top_logprobs": 2}),
    ):
        body |= {**options, "max_tokens": TOKENS, "n": 2}
        whole = whole_answer(server.complete(**body) if path == COMPLETIONS else server.chat(**body))
        events = server.stream(path, **body, **usage)
        assert same(streamed_answer(events), whole)
        sent: dict[int, int] = {}
        for event in events[:-1] if path == COMPLETIONS else ():
            (choice,) = event["choices"]
            sent[choice["index"]] = sent.get(choice["index"], 0) + len(choice["text"])
            offsets = choice["logprobs"]["text_offset"] if choice["logprobs"] else []
            assert all(offset < sent[choice["index"]] for offset in offsets)


def test_scores_do_not_change_when_requests_are_preempted(server: Server) -> None:
    """Every prompt's scores once and in order, also where its prefill was thrown away and done again."""
    bodies = [
        {"prompt": f"{index} {LONG[:60]}", "max_tokens": 30, "temperature": index % 2, "seed": index, "logprobs": 2,
         "prompt_logprobs": 1, "echo": index % 3 == 0, "ignore_eos": True}
        for index in range(12)
    ]  # fmt: skip
    alone = [whole_answer(server.complete(**body)) for body in bodies]
    before = server.total("preemptions_total")
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: whole_answer(server.complete(**body)), bodies))
    assert all(map(same, together, alone))
    server.wait_empty()
    assert server.total("preemptions_total") > before
