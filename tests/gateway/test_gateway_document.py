"""Real answers of every shape against the models that the OpenAPI document shows."""

from itertools import product
from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, MESSAGES, stream, whole
from conftest import Cluster
from fake_engine import Answer
from tiny_tokenizer import EOS, ids

from moe_runtime.gateway import answer_schema as answers

SHARED: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1},
    {"max_tokens": 1},
    {"stop": "b"},
    {"stop_token_ids": ids("b")},
    {"ignore_eos": True, "skip_special_tokens": False},
    {"stop": "b", "include_stop_str_in_output": True},
]
TEXT_SCORES: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": 2, "echo": True},
    {"echo": True},
]
CHAT_SCORES: list[dict[str, Any]] = [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 4}]
USAGE: list[dict[str, Any]] = [
    {},
    {"include_usage": True},
    {"continuous_usage_stats": True},
    {"include_usage": True, "continuous_usage_stats": True},
]


@pytest.fixture(autouse=True)
def says_something(cluster: Cluster) -> None:
    cluster.script(lambda submit: Answer([(ids("a")[0],), tuple(ids("€b")), (EOS,)], "stop"))


@pytest.mark.parametrize("prompt_scores", [None, 0, 3])
def test_whole_answers(cluster: Cluster, prompt_scores: int | None) -> None:
    more = {"prompt_logprobs": prompt_scores}
    for shared, scores in product(SHARED, TEXT_SCORES):
        answer = whole(cluster, COMPLETIONS, prompt=["xy", "z"], **shared, **scores, **more)
        shown = answers.TextCompletion.model_validate(answer)
        assert len(shown.choices) == 2 * shared.get("n", 1)
        assert (shown.choices[0].prompt_logprobs is None) == (prompt_scores is None)
    for shared, scores in product(SHARED, CHAT_SCORES):
        answers.ChatCompletion.model_validate(whole(cluster, CHAT, messages=MESSAGES, **shared, **scores, **more))


@pytest.mark.parametrize("usage", USAGE, ids=str)
def test_streams(cluster: Cluster, usage: dict[str, Any]) -> None:
    for shared, scores in product(SHARED, TEXT_SCORES):
        for event in stream(cluster, COMPLETIONS, prompt=["xy", "z"], stream_options=usage, **shared, **scores):
            answers.TextCompletionChunk.model_validate(event)
    for shared, scores in product(SHARED, CHAT_SCORES):
        for event in stream(cluster, CHAT, messages=MESSAGES, stream_options=usage, **shared, **scores):
            answers.ChatCompletionChunk.model_validate(event)


def test_the_rest(cluster: Cluster) -> None:
    for path, model in (
        ("/v1/models", answers.ModelList),
        ("/v1/models/tiny", answers.ModelCard),
        ("/health", answers.State),
        ("/ready", answers.State),
        ("/version", answers.Version),
        ("/nothing", answers.Error),
    ):
        model.model_validate(cluster.http.get(path).json())
    tokens = cluster.http.post("/tokenize", json={"prompt": "a", "return_token_strs": True}).json()
    assert answers.Tokens.model_validate(tokens).token_strs == ["a"]
    text = cluster.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert answers.Text.model_validate(text).prompt == "a"
    cluster.script(lambda submit: Answer([(ids("a")[0],)], failure=("internal", "broken")))
    last = cluster.http.post(COMPLETIONS, json={"prompt": "x", "stream": True}).text.strip().split("\n\n")[-1]
    answers.Error.model_validate_json(last.removeprefix("data: "))
