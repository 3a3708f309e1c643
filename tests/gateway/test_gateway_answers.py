"""What both endpoints answer, whole and streamed, as the openai client and raw HTTP see it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from asking import COMPLETIONS, MODEL, stream
from conftest import Cluster
from fake_controller import wait_until
from fake_engine import Answer
from own_gateway import gateway
from tiny_tokenizer import EOS, ids

from moe_runtime.protocol.messages import SamplingParams

UNICODE = "Příliš 🦙 žluťoučký € 日本語"


def test_completion_whole(cluster: Cluster) -> None:
    completion = cluster.openai.completions.create(model=MODEL, prompt="abc", max_tokens=7)
    assert completion.choices[0].text == "abcabca"
    assert completion.choices[0].finish_reason == "length"
    assert completion.object == "text_completion" and completion.id.startswith("cmpl-") and completion.model == MODEL
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (
        3,
        7,
        10,
    )


def test_chat_whole_uses_the_template(cluster: Cluster) -> None:
    cluster.says("hi there", finish="stop")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hé"}]},
    ]
    chat = cluster.openai.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=20)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == "hi there" and chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == "stop"
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert list(cluster.submitted[0].prompt_ids) == ids(rendered)
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(ids(rendered)), 9)


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_streamed_text_equals_the_whole_and_has_no_half_characters(cluster: Cluster, per_step: int) -> None:
    cluster.says(UNICODE, finish="stop", per_step=per_step)
    whole = cluster.openai.completions.create(model=MODEL, prompt="x", max_tokens=100).choices[0].text
    pieces = [event["choices"][0]["text"] for event in stream(cluster, "/v1/completions", prompt="x")]
    assert whole == "".join(pieces) == UNICODE
    assert not any("\ufffd" in piece for piece in pieces)
    chat = cluster.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == UNICODE


def test_chat_stream_form(cluster: Cluster) -> None:
    cluster.says("ab", finish="stop")
    messages = [{"role": "user", "content": "x"}]
    chunks = stream(cluster, "/v1/chat/completions", messages=messages, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_completion_stream_form(cluster: Cluster) -> None:
    chunks = stream(cluster, "/v1/completions", prompt="ab", max_tokens=3)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "a"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("prompt", [["ab", "cde"], [ids("ab"), ids("cde")]])
def test_a_list_of_prompts_has_one_choice_each_and_one_finish_each(cluster: Cluster, prompt: Any) -> None:
    completion = cluster.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
    assert [choice.text for choice in completion.choices] == ["abab", "cdec"]
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.usage is not None and completion.usage.total_tokens == 5 + 8
    chunks = stream(cluster, "/v1/completions", prompt=prompt, max_tokens=4)
    for index, text in enumerate(["abab", "cdec"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]


def test_token_ids_are_a_prompt(cluster: Cluster) -> None:
    completion = cluster.openai.completions.create(model=MODEL, prompt=ids("xy"), max_tokens=2)
    assert completion.choices[0].text == "xy"


@pytest.mark.parametrize("per_step", [1, 2, 50])
@pytest.mark.parametrize("stop", ["STOP", ["never", "TOP", "STOP"]])
def test_stop_strings_cut_exactly_and_free_the_request(cluster: Cluster, per_step: int, stop: Any) -> None:
    text = "one STO two STOP three"
    tokens = ids(text)
    steps = [tuple(tokens[start : start + per_step]) for start in range(0, len(tokens), per_step)]
    cluster.script(lambda submit: Answer(steps, finish=None))
    whole = cluster.openai.completions.create(model=MODEL, prompt="x", stop=stop, max_tokens=100)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("one STO two ", "stop")
    assert whole.usage is not None and whole.usage.completion_tokens == len("one STO two STOP")
    chunks = stream(cluster, "/v1/completions", prompt="x", stop=stop, max_tokens=100)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one STO two "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_aborts_on_the_engine(cluster: Cluster) -> None:
    cluster.script(lambda submit: Answer([(token,) for token in ids("a#b")], finish=None))
    cluster.openai.completions.create(model=MODEL, prompt="x", stop="#", max_tokens=100)
    wait_until(lambda: cluster.aborted == [cluster.submitted[0].request_id], "the abort")


def test_text_held_back_for_a_stop_string_comes_at_the_end(cluster: Cluster) -> None:
    cluster.says("ab##")
    assert cluster.openai.completions.create(model=MODEL, prompt="x", stop="###").choices[0].text == "ab##"


def test_an_unfinished_character_at_the_end_is_marked_alike_in_both_forms(cluster: Cluster) -> None:
    tokens = ids("a€")[:-1]
    cluster.script(lambda submit: Answer([(token,) for token in tokens]))
    whole = cluster.openai.completions.create(model=MODEL, prompt="x").choices[0].text
    pieces = [chunk["choices"][0]["text"] for chunk in stream(cluster, "/v1/completions", prompt="x")]
    assert whole == "".join(pieces) == "a\ufffd"


def test_end_of_text_and_special_tokens_have_no_text(cluster: Cluster) -> None:
    cluster.script(lambda submit: Answer([(ids("a")[0],), (EOS - 1,), (ids("b")[0], EOS)], finish="stop"))
    completion = cluster.openai.completions.create(model=MODEL, prompt="x")
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("ab", "stop")
    assert completion.usage is not None and completion.usage.completion_tokens == 4


def test_nothing_but_end_of_text_is_an_empty_answer(cluster: Cluster) -> None:
    cluster.says("", finish="stop")
    assert cluster.openai.completions.create(model=MODEL, prompt="x").choices[0].text == ""
    chunks = stream(cluster, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


def test_null_is_the_default(cluster: Cluster) -> None:
    fields = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "n", "logprobs", "logit_bias"]
    for body in ({}, dict.fromkeys(fields)):
        cluster.http.post("/v1/completions", json={"prompt": "x", **body}).raise_for_status()
    first, second = (submit.sampling for submit in cluster.submitted)
    assert first.seed != second.seed
    for sampling in (first, second):
        assert msgspec.structs.replace(sampling, seed=0) == SamplingParams(24, stop_token_ids=(EOS,))


def test_neutral_values_of_fields_to_come_are_accepted(cluster: Cluster) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    shared = {"user": "someone", "response_format": {"type": "text"}, **neutral}
    completion = {"prompt": "x", "echo": False, "best_of": 1, "logprobs": None, **shared}
    messages = [{"role": "user", "content": "x"}]
    chat = {"messages": messages, "logprobs": False, "tools": [], "tool_choice": "auto", **shared}
    assert cluster.http.post("/v1/completions", json=completion).status_code == 200
    assert cluster.http.post("/v1/chat/completions", json=chat).status_code == 200


def test_an_answer_can_be_sent_back_as_history(cluster: Cluster) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    answer = cluster.openai.chat.completions.create(model=MODEL, messages=messages).choices[0].message
    messages += [answer.model_dump(), {"role": "user", "content": "y"}]
    assert cluster.openai.chat.completions.create(model=MODEL, messages=messages).choices[0].finish_reason == "length"


def test_max_tokens_left_open_is_clipped_to_what_fits(cluster: Cluster) -> None:
    completion = cluster.openai.completions.create(model=MODEL, prompt="x" * 390)
    assert completion.usage is not None and completion.usage.completion_tokens == 10


def test_any_unicode_goes_in_and_out(cluster: Cluster) -> None:
    text = '\x00\u2028\ufeff"\\</script>\U0010ffff'
    completion = cluster.openai.completions.create(model=MODEL, prompt=text, max_tokens=len(ids(text)))
    assert completion.choices[0].text == text
    pieces = [
        chunk["choices"][0]["text"]
        for chunk in stream(cluster, "/v1/completions", prompt=text, max_tokens=len(ids(text)))
    ]
    assert "".join(pieces) == text


def test_long_prompts_are_tokenized_too(cluster: Cluster) -> None:
    error = cluster.http.post("/v1/completions", json={"prompt": "x" * 100_000}).json()["error"]
    assert "100000 tokens" in error["message"]
    cluster.openai.completions.create(model=MODEL, prompt="next", max_tokens=1)


def test_requests_spread_over_the_nodes(cluster: Cluster) -> None:
    cluster.openai.completions.create(model=MODEL, prompt=["abcd"] * 8, max_tokens=4)
    assert [len(engine.submitted) for engine in cluster.engines] == [4, 4]


def test_a_fault_in_mid_stream_is_said_and_frees_the_request(model_dir: Path) -> None:
    """Token -1 is no token: this breaks the gateway and no rule of HTTP."""
    with gateway(model_dir) as (process, engine):
        url = process.wait_serving() + COMPLETIONS
        engine.script = lambda submit: Answer([(ids("a")[0],), (-1,)], finish=None)
        lines: list[str] = []
        body = {"prompt": "x", "stream": True}
        with suppress(httpx.RemoteProtocolError), httpx.stream("POST", url, json=body) as response:
            for line in response.iter_lines():
                lines += [line] if line else []
        assert httpx.post(url, json={"prompt": "x"}).status_code == 500
        wait_until(lambda: len(engine.aborted) == 2, "both to be aborted")
        engine.script = lambda submit: Answer([tuple(ids("fine"))])
        assert httpx.post(url, json={"prompt": "x"}).json()["choices"][0]["text"] == "fine"
    assert '"text":"a"' in lines[0] and "its log has the details" in lines[-1]
    assert "OverflowError" in process.close()
