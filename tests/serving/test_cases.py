"""Bug reports of other engines as black boxes: the numbers of the cases are those of the project's notes on serving.

After each, the next request is answered right and nothing is left (the `server` fixture). What a case needs that this
server does not do yet is refused by name.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import openai
import pytest

from tests.serving.reference import Reference
from tests.serving.server import BLOCK_SIZE, BLOCKS, CAPACITY, MODEL, Server, tiny_cluster
from tests.serving.wire import CHAT, COMPLETIONS, connect, receive

PROMPT = "Water boils at"
MESSAGES: list[Any] = [{"role": "user", "content": "x"}]
PATHS = {COMPLETIONS: {"prompt": PROMPT}, CHAT: {"messages": MESSAGES}}
both_paths = pytest.mark.parametrize("path", PATHS)


def client_text(server: Server, **body: Any) -> str:
    """A greedy completion's text by the openai client."""
    extra = {name: body.pop(name) for name in list(body) if name in ("top_k", "min_p", "repetition_penalty")}
    answer = server.openai.completions.create(model=MODEL, **{"prompt": PROMPT, **body}, extra_body=extra)
    return answer.choices[0].text


def refused_by_client(server: Server, **body: Any) -> Any:
    """The error body that the openai client shows for a completion that is refused with 400."""
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model=MODEL, prompt=PROMPT, extra_body=body)
    return caught.value.body


def test_case_01_temperature_0_and_top_k_1_are_the_same_tokens(server: Server, reference: Reference) -> None:
    expected = reference.greedy_text(PROMPT, 16)
    assert client_text(server, temperature=0, max_tokens=16) == expected
    assert client_text(server, temperature=1, top_k=1, max_tokens=16) == expected
    assert server.text(PROMPT, temperature=1, top_k=1, max_tokens=16) == expected


def test_case_01_a_greedy_request_and_those_beside_it_are_independent(server: Server) -> None:
    drawing = [{"prompt": f"{PROMPT} {i}", "temperature": 1, "seed": i, "max_tokens": 12} for i in range(8)]
    alone = [server.complete(**body)["choices"][0]["text"] for body in drawing]
    greedy = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    mixed = [body for draw in drawing for body in (draw, greedy)]
    texts = server.texts(mixed)
    assert texts[::2] == alone
    assert set(texts[1::2]) == {server.text(PROMPT, max_tokens=12)}


@both_paths
def test_case_02_numbers_that_are_not_json(server: Server, path: str) -> None:
    fields = ("temperature", "top_p", "seed", "max_tokens", "logit_bias", "timeout", "unknown")
    numbers = ("NaN", "Infinity", "-Infinity", "1e999", "nan", "1.", "0x1")
    for field, number in product(fields, numbers):
        value = '{"5": ' + number + "}" if field == "logit_bias" else number
        body = json.dumps(PATHS[path])[:-1] + f', "{field}": {value}' + "}"
        server.refused(body.encode(), path)


def test_case_03_a_huge_top_k_is_clamped_and_mixes_with_greedy(server: Server) -> None:
    expected = server.text(PROMPT, max_tokens=8)
    huge = {"prompt": PROMPT, "top_k": 9_999_999, "seed": 1, "temperature": 1, "max_tokens": 8}
    bodies = [{**huge, "temperature": 0}, huge, {**huge, "top_k": 1}, {**huge, "top_k": 3}] * 3
    texts = server.texts(bodies)
    assert texts[0::4] + texts[2::4] == [expected] * 6
    assert len(set(texts[1::4])) == len(set(texts[3::4])) == 1
    assert client_text(server, top_k=9_999_999, temperature=0, max_tokens=8) == expected


@both_paths
def test_case_03_what_is_out_of_range_is_named(server: Server, path: str) -> None:
    for field, value in (
        ("temperature", 999999), ("temperature", -1), ("top_p", -1), ("top_p", 0), ("top_p", 2), ("top_k", -5),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 3), ("min_p", 7),
        ("presence_penalty", 3), ("frequency_penalty", -3),
    ):  # fmt: skip
        assert server.refused({**PATHS[path], field: value}, path)["param"] == field
        assert refused_by_client(server, **{field: value})["param"] == field


def test_case_03_another_engines_name_of_a_field_is_unknown_here(server: Server) -> None:
    error = server.refused({"prompt": PROMPT, "repeat_penalty": 0})
    assert error["param"] == "repeat_penalty" and "repetition_penalty" in error["message"]


@both_paths
def test_case_04_token_ids_outside_the_vocabulary(server: Server, path: str) -> None:
    for field, value in (
        ("logit_bias", {"512": 1}), ("logit_bias", {"999999999": -100}), ("stop_token_ids", [512]),
        ("stop_token_ids", [-1]), ("stop_token_ids", [2**70]), ("allowed_token_ids", [3, 512]),
        ("allowed_token_ids", [-1]),
    ):  # fmt: skip
        for stream in (False, True):
            assert server.refused({**PATHS[path], field: value, "stream": stream}, path)["param"] == field
        assert refused_by_client(server, **{field: value})["param"] == field


def test_case_05_penalties_and_the_prompt(server: Server, reference: Reference) -> None:
    """The best first token is already in the prompt: presence and frequency leave it, repetition does not."""
    prompt = PROMPT + reference.text(reference.greedy(reference.ids(PROMPT), 8)) + PROMPT
    token = reference.ids(prompt)[0]
    logits_V = reference.logprobs(reference.ids(prompt))[-1]
    bias = {str(token): float(logits_V.max() - logits_V[token]) + 0.5}
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logit_bias": bias}
    first = reference.text([token])
    assert client_text(server, **body, presence_penalty=2) == client_text(server, **body, frequency_penalty=2) == first
    assert client_text(server, **body, repetition_penalty=2) != first


@both_paths
def test_case_06_streams_of_several_choices_finish_each_once(server: Server, path: str) -> None:
    body = {**PATHS[path], "n": 3, "seed": 2, "max_tokens": 9}
    whole = server.complete(**body) if path == COMPLETIONS else server.chat(**body)
    events = server.stream(path, **body, stream_options={"include_usage": True})
    *chunks, last = events
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] is None for choice in own] == [True] * (len(own) - 1) + [False]
        texts = [choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or "" for choice in own]
        right = whole["choices"][index]
        assert "".join(texts) == (right["text"] if path == COMPLETIONS else right["message"]["content"])


def test_case_06_the_openai_client_sees_each_choice_once(server: Server) -> None:
    finished: list[int] = []
    for chunk in server.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, stream=True, max_tokens=6, seed=1
    ):
        finished += [choice.index for choice in chunk.choices if choice.finish_reason]
    assert sorted(finished) == [0, 1]


def test_case_07_a_stop_string_across_tokens_is_cut_and_no_beginning_sent(server: Server, reference: Reference) -> None:
    readable = reference.readable_ids()
    text = server.text(PROMPT, max_tokens=20, allowed_token_ids=readable)
    stop = text[5:13]
    assert len(reference.ids(stop)) > 1
    stream = server.openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop], stream=True,
        extra_body={"allowed_token_ids": readable},
    )  # fmt: skip
    sent = ""
    for chunk in stream:
        sent += chunk.choices[0].text
        assert text[: text.find(stop)].startswith(sent)
    assert sent == text[: text.find(stop)]


@pytest.mark.parametrize("character", ["ď", "€", "🦙"])
def test_case_08_characters_of_several_tokens(server: Server, reference: Reference, character: str) -> None:
    """The model may say the character's own bytes only, in whatever order: some come out whole, most are no text."""
    tokens = reference.ids(character)
    assert len(tokens) == len(character.encode())
    # So hot that every order of the bytes is as likely as any other, and the more choices the more orders there are.
    drawing = {"temperature": 100, "seed": 3, "n": 2 ** len(tokens), "max_tokens": 60, "allowed_token_ids": tokens}
    body: dict[str, Any] = {"prompt": f"{character}x", **drawing}
    whole = [choice["text"] for choice in server.complete(**body)["choices"]]
    assert any(character in text for text in whole) and any("\ufffd" in text for text in whole)
    for before, echo in (("", False), (f"{character}x", True)):
        texts = [""] * len(whole)
        for event in server.stream(**body, echo=echo):
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [before + text for text in whole]


def test_case_08_every_unicode_text_comes_back_as_it_was(server: Server) -> None:
    text = 'Příliš 🦙\u200d👩 日本語 \x00\u2028\ufeff"\\</script>\U0010ffff'
    assert server.complete(prompt=text, echo=True, max_tokens=0)["choices"][0]["text"] == text
    tokens = server.call("/tokenize", {"prompt": text}).json["tokens"]
    assert server.call("/detokenize", {"tokens": tokens}).json["prompt"] == text


@both_paths
def test_case_09_null_is_the_default(server: Server, path: str) -> None:
    fields = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "user", "logprobs")
    body = {**PATHS[path], **dict.fromkeys(fields)}
    answer = server.complete(**body) if path == COMPLETIONS else server.chat(**body)
    assert 1 <= answer["usage"]["completion_tokens"] <= 12


def test_case_09_an_empty_prompt_is_refused(server: Server) -> None:
    for prompt in ("", [""], ["a", ""], [], [[]], [[], [5]], None):
        for stream in (False, True):
            assert server.refused({"prompt": prompt, "stream": stream})["param"] == "prompt"
    for empty in ("", [""]):
        with pytest.raises(openai.BadRequestError):
            server.openai.completions.create(model=MODEL, prompt=empty)


def test_case_10_echo_with_scores_and_top_k_1_is_finite(server: Server) -> None:
    answer = server.openai.completions.create(
        model=MODEL, prompt=PROMPT, echo=True, logprobs=2, max_tokens=5, temperature=1, extra_body={"top_k": 1}
    )
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None and scores.top_logprobs is not None
    first, *rest = scores.token_logprobs
    assert first is None
    assert all(-50 < logprob <= 0 for logprob in rest)
    assert all(-50 < logprob <= 0 for top in scores.top_logprobs[1:] for logprob in top.values())


@both_paths
def test_case_11_an_overlong_prompt_is_refused_with_true_counts(
    server: Server, reference: Reference, path: str
) -> None:
    text = "the number " * CAPACITY
    messages = [{"role": "user", "content": text}]
    if path == COMPLETIONS:
        body, ids = {"prompt": text}, reference.ids(text)
    else:
        body, ids = {"messages": messages}, reference.chat_ids(messages, add_generation_prompt=True)
    for stream in (False, True):
        error = server.refused({**body, "stream": stream}, path)
        assert error["code"] == "context_length_exceeded"
        assert {str(len(ids)), str(CAPACITY)} <= set(re.findall(r"\d+", error["message"]))


def test_case_11_the_openai_client_raises_before_any_event(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CAPACITY)):
        server.openai.completions.create(model=MODEL, prompt="the number " * CAPACITY, stream=True)


@both_paths
def test_case_12_malformed_bodies(server: Server, path: str) -> None:
    for body in (
        b"", b"{", b"str", b'"str"', b"[]", b"null", b"5", b"true", b"{'prompt': 'x'}", b'{"prompt": "x",}', b"\x00",
        b"\xff\xfe\x00", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"messages": ' + b"[" * 100_000, b"{}{}",
    ):  # fmt: skip
        server.refused(body, path)


@both_paths
def test_case_12_the_content_type_is_missing_or_wrong(server: Server, path: str) -> None:
    connection = connect(server.url)
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {} if kind is None else {"Content-Type": kind}
        connection.request("POST", path, json.dumps(PATHS[path]), headers)
        reply = receive(connection)
        assert reply.status == 415 and "application/json" in reply.error["message"]
    connection.close()


def test_case_13_huge_lists_are_refused_while_others_go_on(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        for field, value in (
            ("stop", ["a"] * 500_000), ("prompt", ["a"] * 500_000), ("prompt", [["1"]] * 100_000), ("seed", 10**100),
            ("prompt", [[1]] * 500_000), ("bad_words", ["a"] * 500_000), ("stop_token_ids", [1] * 1_000_000),
            ("logit_bias", {str(token): 1 for token in range(200_000)}), ("n", 10**9), ("stop", "a" * 4_000_000),
            ("a" * 1_000_000, 1),
        ):  # fmt: skip
            beside = pool.submit(server.text, PROMPT, max_tokens=4)
            error = server.refused({"prompt": PROMPT, "max_tokens": 1, field: value})
            assert error["param"] == field[:80] and len(json.dumps(error)) < 1000
            assert beside.result(60)


def test_case_13_many_allowed_tokens_are_what_each_of_them_is_once(server: Server) -> None:
    body = {"max_tokens": 3, "seed": 1, "temperature": 1}
    assert server.text(PROMPT, **body, allowed_token_ids=[40, 41] * 400_000) == server.text(
        PROMPT, **body, allowed_token_ids=[41, 40]
    )


def test_case_13_a_body_beyond_the_limit(server: Server) -> None:
    server.refused({"prompt": "x" * 5_000_000}, status=413)


def test_case_19_what_can_never_fit_the_pool_is_refused_and_what_just_fits_runs(server: Server) -> None:
    error = server.refused({"prompt": [5] * 20, "max_tokens": CAPACITY, "stream": True})
    assert error["code"] == "context_length_exceeded"
    assert server.complete(prompt=[5] * 20, max_tokens=CAPACITY - 20, ignore_eos=True)["usage"]["total_tokens"] == (
        BLOCK_SIZE * BLOCKS
    )


def test_case_19_output_after_preemption_is_the_same_as_without(server: Server, reference: Reference) -> None:
    """Twelve at once need several times the pool; half are greedy, half drawn."""
    bodies = [
        {"prompt": f"{index} {PROMPT}", "max_tokens": 32, "seed": index, "temperature": index % 2, "ignore_eos": True}
        for index in range(12)
    ]
    alone = [server.complete(**body)["choices"][0]["text"] for body in bodies]
    before = server.total("preemptions_total")
    assert server.texts(bodies) == alone
    server.wait_empty()
    assert server.total("preemptions_total") > before


def test_case_20_beam_search_is_refused_by_name(server: Server) -> None:
    for field, value in (("use_beam_search", True), ("best_of", 4), ("length_penalty", 0.5)):
        error = server.refused({"prompt": PROMPT, field: value})
        assert error["param"] == field and "not support" in error["message"]


@both_paths
def test_case_21_max_tokens_1_is_one_token(server: Server, path: str) -> None:
    body = {**PATHS[path], "max_tokens": 1, "ignore_eos": True}
    answer = server.complete(**body) if path == COMPLETIONS else server.chat(**body)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_case_24_a_burst_is_spread_over_the_nodes(
    server: Server, tmp_path_factory: pytest.TempPathFactory, model_dir: Any
) -> None:
    bodies = [{"prompt": f"{PROMPT} {index}", "max_tokens": 24, "temperature": 0} for index in range(16)]
    expected = [server.complete(**body)["choices"][0]["text"] for body in bodies]
    with tiny_cluster(tmp_path_factory.mktemp("two"), model_dir, attention=2, ffn=0) as two:
        assert two.texts(bodies) == expected
        two.wait_empty()
        steps = {key: value for key, value in two.metrics().items() if key.startswith("step_requests_total")}
    assert len(steps) == 2
    assert min(steps.values()) > 0.25 * sum(steps.values())


def test_case_24_no_hang_at_the_maximum_length(server: Server) -> None:
    for prompt_tokens in (1, CAPACITY // 2, CAPACITY - 2, CAPACITY - 1):
        room = CAPACITY - prompt_tokens
        body: dict[str, Any] = {"prompt": [40] * prompt_tokens, "ignore_eos": True, "temperature": 0}
        answer = server.complete(**body, max_tokens=room)
        assert answer["usage"]["completion_tokens"] == room and answer["choices"][0]["finish_reason"] == "length"
        server.refused({**body, "max_tokens": room + 1})


def test_case_24_a_step_without_tokens_for_a_node(server: Server) -> None:
    """A single token visits two of eight experts, so one FFN node of two is often left out of a layer."""
    calls = server.total("ffn_calls_total")
    answer = server.complete(prompt=[7], max_tokens=40, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 40
    server.wait_empty()
    layers_by_nodes = 3 * 2 * 40
    assert 0 < server.total("ffn_calls_total") - calls < layers_by_nodes
