"""How a conversation is rendered: where it stops, which variables clients may set, and what comes of bad ones."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Cluster
from tiny_tokenizer import ids, write_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from moe_runtime.gateway.errors import ApiError
from moe_runtime.gateway.template_variables import check_variables
from moe_runtime.gateway.tokenizer import TextTokenizer

USER = {"role": "user", "content": "x"}
RENDERED = "<|im_start|>user\nx<|im_end|>\n"


@pytest.fixture(autouse=True)
def the_next_request_works(cluster: Cluster) -> Iterator[None]:
    yield
    assert cluster.http.post("/v1/chat/completions", json={"messages": [USER]}).status_code == 200


def prompt(cluster: Cluster, **body: Any) -> list[int]:
    cluster.http.post("/v1/chat/completions", json={"max_tokens": 1, **body}).raise_for_status()
    return list(cluster.submitted[-1].prompt_ids)


def refused(cluster: Cluster, **body: Any) -> dict[str, Any]:
    response = cluster.http.post("/v1/chat/completions", json={"messages": [USER], **body})
    assert response.status_code == 400, response.text
    assert not cluster.submitted and len(response.content) < 1000
    return response.json()["error"]


def test_where_the_answer_begins(cluster: Cluster) -> None:
    assert prompt(cluster, messages=[USER]) == ids(f"{RENDERED}<|im_start|>assistant\n")
    assert prompt(cluster, messages=[USER], add_generation_prompt=False) == ids(RENDERED)


@pytest.mark.parametrize("text", ["Once", "Once upon ", " a\n\n", "", "CONTINUE_FINAL_MESSAGE_TAG ", "é🦙"])
def test_the_final_message_is_left_open(cluster: Cluster, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": text}]
    expected = ids(f"{RENDERED}<|im_start|>assistant\n{text}")
    for more in ({}, {"add_generation_prompt": False}):
        assert prompt(cluster, messages=messages, continue_final_message=True, **more) == expected


def test_continuing_needs_the_assistants_own_message(cluster: Cluster) -> None:
    assert refused(cluster, continue_final_message=True)["param"] == "continue_final_message"
    messages = [USER, {"role": "assistant", "content": "a"}]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(cluster, messages=messages, **both)["param"] == "continue_final_message"


def test_variables_reach_the_template(cluster: Cluster) -> None:
    expected = f"<|im_start|>tone\nCALM!!<|im_end|>\n{RENDERED}<|im_start|>assistant\n"
    assert prompt(cluster, messages=[USER], chat_template_kwargs={"tone": "calm", "loudness": 2}) == ids(expected)
    unused = {"enable_thinking": False, "nested": {"list": [1, 2.5, None, "x"]}, "thinking_budget": -1}
    assert prompt(cluster, messages=[USER], chat_template_kwargs=unused) == ids(f"{RENDERED}<|im_start|>assistant\n")
    assert prompt(cluster, messages=[USER], chat_template_kwargs=None) == ids(f"{RENDERED}<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "variables",
    [
        {"messages": []},
        {"tools": []},
        {"tokenize": True},
        {"conversation": []},
        {"chat_template": "{{ 1 }}"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"return_dict": True},
        {"return_anything": 1},
        {"_private": 1},
        {"": 1},
        {"a b": 1},
        {"x" * 65: 1},
        {"n": 10**7},
        {"n": -1e300},
        {"n": 2**80},
        {"deep": [[[[[[[[[[1]]]]]]]]]]},
        {"deep": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}}},
        {"long": "x" * 10_000},
        {"many": [0] * 300},
        {"keys": {"x" * 9000: 1}},
        {f"v{index}": 1 for index in range(300)},
        "x",
        [],
        5,
    ],
    ids=lambda value: str(value)[:30],
)
def test_variables_that_are_refused(cluster: Cluster, variables: Any) -> None:
    error = refused(cluster, chat_template_kwargs=variables)
    assert error["param"] == "chat_template_kwargs" and "chat_template_kwargs" in error["message"]


@pytest.mark.parametrize(
    "variables",
    [
        {"tone": "x", "loudness": "x"},
        {"tone": "x", "loudness": [1]},
        {"tone": "x", "loudness": 1.5},
        {"raise_exception": 1, "tone": "x", "loudness": {}},
    ],
)
def test_what_the_template_cannot_do_with_a_variable_is_a_400(cluster: Cluster, variables: Any) -> None:
    assert "template" in refused(cluster, chat_template_kwargs=variables)["message"]


def test_no_variable_can_be_an_argument_of_the_renderer() -> None:
    for function in (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                with pytest.raises(ApiError, match="is no name"):
                    check_variables({name: None})


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception(messages[0].content) }}",
        "{{ messages[0]['content'] | dictsort }}",
        "{{ 1 // (n - 1) }}",
        "{{ range(n * 10 ** 6) | list }}",
        "{{ '%(a)s' % {} }}",
        "{{ messages + n }}",
        "{{ n | tojson(indent=messages) }}",
        "{{ nothing.at.all }}",
        "{{ strftime_now(n) }}",
        "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}",
        "{{ messages.append(n) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'file' %}",
    ],
)
def test_whatever_a_template_does_wrong_is_a_400(tmp_path: Path, template: str | None) -> None:
    write_tokenizer(tmp_path, template)
    tokenizer = TextTokenizer(tmp_path)
    with pytest.raises(ApiError) as caught:
        tokenizer.render([{"role": "user", "content": "x" * 10_000}], {"n": 1})
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "template" in caught.value.message and len(caught.value.message) < 400


def test_many_small_messages_are_counted_truly(cluster: Cluster) -> None:
    error = refused(cluster, messages=[{"role": "user", "content": ""}] * 4096)
    count = 4096 * len(ids("<|im_start|>user\n<|im_end|>\n")) + len(ids("<|im_start|>assistant\n"))
    assert error["code"] == "context_length_exceeded" and f"{count} tokens" in error["message"]
