"""Every sampling field reaches the engine as what it means, or is refused by name."""

from typing import Any

import pytest
from asking import CHAT, COMPLETIONS, MESSAGES, MODEL, refused
from conftest import Cluster
from tiny_tokenizer import EOS, TOKENIZER, VOCAB, ids

from moe_runtime.protocol.messages import SamplingParams

FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 1e-9}, {"temperature": 0.0}),
    ({"top_p": 0.25}, {"top_p": 0.25}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 9_999_999}, {"top_k": VOCAB}),
    ({"min_p": 0.125}, {"min_p": 0.125}),
    ({"seed": -(2**63)}, {"seed": -(2**63)}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    ({"repetition_penalty": 1.25}, {"repetition_penalty": 1.25}),
    ({"logit_bias": {"5": -100, "3": 0.5, "9": 0}}, {"logit_bias": ((5, -100.0), (3, 0.5))}),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
    ({"bad_words": ["ab", " ab", "c"]}, {"bad_words": tuple(tuple(ids(t)) for t in ("ab", " ab", "c", " c"))}),
    ({"bad_words": [" "]}, {"bad_words": (tuple(ids(" ")),)}),
    ({"bad_words": ["é"]}, {"bad_words": (tuple(ids("é")), tuple(ids(" é")))}),
    ({"stop_token_ids": [7, 7, EOS]}, {"stop_token_ids": (EOS, 7)}),
    ({"ignore_eos": True}, {"stop_token_ids": ()}),
    ({"ignore_eos": True, "stop_token_ids": [7]}, {"stop_token_ids": (7,)}),
    ({"min_tokens": 4}, {"min_tokens": 4}),
    ({"min_tokens": 100}, {"min_tokens": 100, "max_tokens": 100}),
    ({"max_tokens": 5}, {"max_tokens": 5}),
]


@pytest.mark.parametrize(("body", "expected"), FIELDS, ids=lambda value: str(value)[:40])
def test_a_field_alone(cluster: Cluster, body: dict[str, Any], expected: dict[str, Any]) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        cluster.http.post(path, json={"seed": 3, **prompt, **body}).raise_for_status()
        default = {"max_tokens": 24, "seed": 3, "stop_token_ids": (EOS,)}
        assert cluster.submitted[-1].sampling == SamplingParams(**{**default, **expected})


def test_the_openai_client_reaches_all_of_it(cluster: Cluster) -> None:
    cluster.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=3, temperature=0.5, top_p=0.5, seed=1, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={"65": 2}, logprobs=2, n=1, stop=["#"],
        extra_body={"top_k": 4, "min_p": 0.25, "repetition_penalty": 0.5, "min_tokens": 1, "stop_token_ids": [9],
                    "bad_words": ["q"], "allowed_token_ids": [1, 2, 3]},
    )  # fmt: skip
    words = tuple(tuple(ids(text)) for text in ("q", " q"))
    assert cluster.submitted[0].sampling == SamplingParams(
        3, 0.5, 4, 0.5, 0.25, 1, (EOS, 9), 1, 0.5, -0.5, 0.5, ((65, 2.0),), words, (1, 2, 3), 2
    )


@pytest.mark.parametrize("body", [{"logprobs": 3}, {"logprobs": 0}, {"logprobs": 3, "echo": True}])
def test_logprobs_of_completions(cluster: Cluster, body: dict[str, Any]) -> None:
    cluster.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, **body}).raise_for_status()
    sampling = cluster.submitted[0].sampling
    assert sampling.logprobs == body["logprobs"]
    assert sampling.prompt_logprobs == (body["logprobs"] if "echo" in body else None)


def test_logprobs_of_chats(cluster: Cluster) -> None:
    bodies = [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5), ({"logprobs": False}, None)]
    for body, expected in bodies:
        cluster.http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1, **body}).raise_for_status()
        assert cluster.submitted[-1].sampling.logprobs == expected


def test_the_prompt_is_scored_once_unless_every_choice_shows_it(cluster: Cluster) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 1, "prompt_logprobs": 2}

    def counts(**more: Any) -> list[int | None]:
        for engine in cluster.engines:
            engine.submitted.clear()
        cluster.http.post(COMPLETIONS, json={**body, **more}).raise_for_status()
        return [submit.sampling.prompt_logprobs for submit in sorted(cluster.submitted, key=lambda s: s.request_id)]

    assert counts() == [2, None, 2, None]
    assert counts(echo=True) == [2, None, 2, None]
    assert counts(echo=True, logprobs=1) == [2, 1, 2, 1]


def test_bad_words_that_are_long_are_spelled_too(cluster: Cluster) -> None:
    words = [f"{number:04d}" * 20 for number in range(40)]
    cluster.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, "bad_words": words}).raise_for_status()
    expected = [tuple(ids(text)) for word in words for text in (word, f" {word}")]
    assert list(cluster.submitted[0].sampling.bad_words) == expected


@pytest.mark.parametrize("token", [VOCAB, 999_999_999])
def test_token_ids_outside_the_vocabulary_are_refused_by_field(cluster: Cluster, token: int) -> None:
    bodies: list[dict[str, Any]] = [
        {"logit_bias": {str(token): 1}},
        {"stop_token_ids": [1, token]},
        {"allowed_token_ids": [1, token]},
    ]
    for body in bodies:
        for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
            error = refused(cluster, path, **prompt, **body)
            assert error["param"] == next(iter(body)) and str(token) in error["message"]
    for field in ("stop_token_ids", "allowed_token_ids"):
        assert refused(cluster, COMPLETIONS, prompt="x", **{field: [-1]})["param"] == field
    assert refused(cluster, COMPLETIONS, prompt="x", logit_bias={"-1": 1})["param"] == "logit_bias"


def test_the_last_token_of_the_vocabulary_is_inside(cluster: Cluster) -> None:
    last = VOCAB - 1
    body = {"logit_bias": {str(last): 1}, "stop_token_ids": [last], "allowed_token_ids": [last]}
    assert cluster.http.post(COMPLETIONS, json={"prompt": "x", **body}).status_code == 200


A, B = ids("ab")


@pytest.mark.parametrize(
    ("body", "clash"),
    [
        ({"allowed_token_ids": [A, B], "bad_words": ["a", "b"]}, True),
        ({"allowed_token_ids": [A, B], "bad_words": ["a", "bb"]}, False),
        ({"allowed_token_ids": [EOS, A], "bad_words": ["a"]}, False),
        ({"allowed_token_ids": [EOS, A], "bad_words": ["a"], "min_tokens": 1}, True),
        ({"allowed_token_ids": [EOS, A], "bad_words": ["a"], "min_tokens": 1, "ignore_eos": True}, False),
        ({"allowed_token_ids": [A], "stop_token_ids": [A], "min_tokens": 1}, True),
        ({"allowed_token_ids": [A], "stop_token_ids": [A]}, False),
    ],
)
def test_masks_that_leave_nothing_are_refused(cluster: Cluster, body: dict[str, Any], clash: bool) -> None:
    if clash:
        assert refused(cluster, COMPLETIONS, prompt="x", **body)["param"] == "allowed_token_ids"
    else:
        assert cluster.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, **body}).status_code == 200


def test_truncation_keeps_the_prompts_end(cluster: Cluster) -> None:
    cluster.http.post(COMPLETIONS, json={"prompt": "abcdef", "truncate_prompt_tokens": 4}).raise_for_status()
    assert cluster.submitted[-1].prompt_ids == tuple(ids("cdef"))
    cluster.http.post(CHAT, json={"messages": MESSAGES, "truncate_prompt_tokens": 5}).raise_for_status()
    assert TOKENIZER.decode(list(cluster.submitted[-1].prompt_ids)) == "tant\n"
    body = {"prompt": [ids("abc"), ids("d")], "truncate_prompt_tokens": 2, "max_tokens": 1}
    usage = cluster.http.post(COMPLETIONS, json=body).json()["usage"]
    assert usage["prompt_tokens"] == 3


@pytest.mark.parametrize(("more", "kept"), [({}, 399), ({"max_tokens": 30}, 370), ({"min_tokens": 9}, 391)])
def test_truncation_to_what_leaves_room(cluster: Cluster, more: dict[str, int], kept: int) -> None:
    text = "x" * 100 + "y" * 400
    body = {"prompt": text, "truncate_prompt_tokens": -1, "stop_token_ids": [B], **more}
    cluster.says("b")
    cluster.http.post(COMPLETIONS, json=body).raise_for_status()
    (submit,) = cluster.submitted
    assert submit.prompt_ids == tuple(ids(text[-kept:])) and submit.sampling.max_tokens == 400 - kept
    cluster.http.post(COMPLETIONS, json={**body, "prompt": "short"}).raise_for_status()
    assert tuple(ids("short")) in [submit.prompt_ids for submit in cluster.submitted]


def test_lengths_that_do_not_fit_are_refused_with_true_counts(cluster: Cluster) -> None:
    error = refused(cluster, COMPLETIONS, prompt="x" * 390, min_tokens=11)
    assert error["param"] == "min_tokens" and all(count in error["message"] for count in ("390", "11", "401", "400"))
    error = refused(cluster, COMPLETIONS, prompt="x", max_tokens=400, truncate_prompt_tokens=-1)
    assert error["param"] == "max_tokens" and error["code"] == "context_length_exceeded"
    error = refused(cluster, COMPLETIONS, prompt="x", min_tokens=400, truncate_prompt_tokens=-1)
    assert error["param"] == "min_tokens"
    error = refused(cluster, COMPLETIONS, prompt="x" * 450, truncate_prompt_tokens=420)
    assert "420 tokens" in error["message"] and error["param"] == "prompt"
    error = refused(cluster, COMPLETIONS, prompt="x" * 401, max_tokens=0, echo=True)
    assert "401 tokens" in error["message"]


def test_a_prompt_that_fills_everything_can_still_be_scored(cluster: Cluster) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 0, "echo": True}
    answer = cluster.http.post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["text"] == "x" * 400 and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "body", [{"max_tokens": 0}, {"max_tokens": 3, "min_tokens": 4}, {"prompt_logprobs": 1, "stream": True}]
)
def test_fields_that_contradict_each_other(cluster: Cluster, body: dict[str, Any]) -> None:
    assert refused(cluster, COMPLETIONS, prompt="x", **body)["param"] in ("max_tokens", "min_tokens", "prompt_logprobs")


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.01),
    ("presence_penalty", -2.01),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", "1"),
    ("min_tokens", -1),
    ("min_tokens", 1.0),
    ("n", 0),
    ("n", 257),
    ("n", True),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": 1, "01": 1}),
    ("logit_bias", [1]),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", ["1"]),
    ("allowed_token_ids", [1.5]),
    ("bad_words", "a"),
    ("bad_words", [""]),
    ("bad_words", ["a"] * 257),
    ("bad_words", ["a" * 1025]),
    ("stop_token_ids", 5),
    ("stop_token_ids", [True]),
    ("stop_token_ids", list(range(129))),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 0),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("timeout", 0),
    ("timeout", 86401),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE, ids=lambda value: str(value)[:24])
def test_out_of_range_is_refused_by_name(cluster: Cluster, field: str, value: Any) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        error = refused(cluster, path, **prompt, **{field: value})
        assert error["param"].split("[")[0].split(".")[0] == field and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("field", "value"), [("logprobs", 21), ("logprobs", True), ("echo", 1)])
def test_completions_own_fields_out_of_range(cluster: Cluster, field: str, value: Any) -> None:
    assert refused(cluster, COMPLETIONS, prompt="x", **{field: value})["param"] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_chats_own_fields_out_of_range(cluster: Cluster, body: dict[str, Any], field: str) -> None:
    assert refused(cluster, CHAT, messages=MESSAGES, **body)["param"] == field


def test_more_choices_than_one_request_may_have(cluster: Cluster) -> None:
    assert refused(cluster, COMPLETIONS, prompt=["x"] * 100, n=3)["param"] == "n"
