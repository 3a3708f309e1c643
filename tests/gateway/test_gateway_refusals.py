"""Bad requests: a documented status with OpenAI's error body, never a 500, and the next request works."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import Cluster
from fake_controller import wait_until
from fake_engine import Answer
from raw_http import exchange
from tiny_tokenizer import VOCAB, ids

MESSAGES = [{"role": "user", "content": "x"}]
# Every route that takes a body, with a good one.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(autouse=True)
def the_next_request_works(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.script(lambda submit: Answer([(ids("k")[0],)]))
    assert cluster.openai.completions.create(model="tiny/model", prompt="x").choices[0].text == "k"


def refused(cluster: Cluster, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a refusal; nothing may have reached an engine."""
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    response = cluster.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert len(response.content) < 1000
    assert not cluster.submitted
    return error


OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", 999999),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 1.1),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("seed", 2**63),
    ("seed", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", ["a"] * 100_000),
    ("stop", "a" * 5000),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stream", "yes"),
    ("stream_options", {"include_usage": "yes"}),
    ("user", 5),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE, ids=lambda value: str(value)[:20])
def test_out_of_range_is_refused_by_name(cluster: Cluster, field: str, value: Any) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        error = refused(cluster, path, {**body, field: value})
        assert error["param"].split("[")[0].split(".")[0] == field
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "prompt",
    ["", [""], ["a", ""], [], [[]], [[], [1]], [1, "a"], [[1], "a"], [1.5], [True], 5, {"a": 1}, ["a"] * 129, [None]],
    ids=lambda prompt: str(prompt)[:20],
)
def test_bad_prompts(cluster: Cluster, prompt: Any) -> None:
    assert refused(cluster, "/v1/completions", {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, VOCAB, 2**80])
def test_token_ids_outside_the_vocabulary(cluster: Cluster, token: int) -> None:
    error = refused(cluster, "/v1/completions", {"prompt": [0, token]})
    assert error["param"] == "prompt" and str(token) in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("x", "messages"),
        ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "name": "me"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        ([*MESSAGES, {"role": "system", "content": "late"}], "messages"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_messages(cluster: Cluster, messages: Any, param: str) -> None:
    error = refused(cluster, "/v1/chat/completions", {"messages": messages})
    assert error["param"] is not None and error["param"].startswith(param)


def test_what_the_template_refuses_is_said(cluster: Cluster) -> None:
    messages = [*MESSAGES, {"role": "system", "content": "late"}]
    assert "system must come first" in refused(cluster, "/v1/chat/completions", {"messages": messages})["message"]


def test_images_are_refused_by_name(cluster: Cluster) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    error = refused(cluster, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert error["param"] == "messages[0].content[0].image_url" and "not support" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("best_of", 2), ("use_beam_search", True), ("response_format", {"type": "json_object"}), ("suffix", "x"),
     ("guided_regex", "a+"), ("return_token_ids", True)],
)  # fmt: skip
def test_known_fields_not_there_yet_are_refused_by_name(cluster: Cluster, field: str, value: Any) -> None:
    error = refused(cluster, "/v1/completions", {"prompt": "x", field: value})
    assert error["param"] == field and "not support" in error["message"] and field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{"type": "function"}]), ("chat_template", "x"), ("tool_choice", "required")],
)
def test_known_chat_fields_not_there_yet_are_refused_by_name(cluster: Cluster, field: str, value: Any) -> None:
    error = refused(cluster, "/v1/chat/completions", {"messages": MESSAGES, field: value})
    assert error["param"] == field and "not support" in error["message"]


def test_unknown_fields_are_refused_by_name_even_when_null(cluster: Cluster) -> None:
    for value in (None, 5, {"deep": []}):
        error = refused(cluster, "/v1/completions", {"prompt": "x", "temprature": value})
        assert error["param"] == "temprature" and "did you mean temperature" in error["message"]
    error = refused(cluster, "/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"colour": 1}})
    assert error["param"] == "stream_options.colour"


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b'{"prompt": "x"', b"null", b"[]", b'"str"', b"5", b"true", b"NaN", b"{'prompt': 1}", b"\xff\xfe",
     b'{"prompt": "\xff"}', b'\xef\xbb\xbf{"prompt": "x"}', b'{"prompt": "x"} {}', b'{"prompt": "x",}',
     b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00 x"}', b'{"\\ud800": 1}', b'{"prompt": "a\nb"}',
     b'{"prompt": \'x\'}',
     b'{"prompt": ' + b"[" * 100_000, b'{"a":' * 100_000, b'{"NaN": NaN}', b'{"\\u0000": 1, "prompt": "x"}',
     b'{"prompt": 01}', b'{"prompt": "\\x"}'],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_malformed_bodies(cluster: Cluster, body: bytes) -> None:
    for path in ROUTES:
        refused(cluster, path, body)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000])
@pytest.mark.parametrize(
    "field",
    ["temperature", "seed", "max_tokens", "logit_bias", "stop", "user", "timeout", "stream_options", "messages",
     "prompt", "tokens", "chat_template_kwargs", "colour"],
)  # fmt: skip
def test_numbers_that_are_none_or_no_float(cluster: Cluster, field: str, number: str) -> None:
    """Wherever they stand, alone or deep: the answer is a 400 in valid JSON that does not repeat them."""
    for path, good in ROUTES.items():
        for value in (number, f'{{"1": {number}}}', f"[[{number}]]"):
            rest = json.dumps({name: entry for name, entry in good.items() if name != field})[1:]
            comma = "" if rest == "}" else ", "
            refused(cluster, path, f'{{"{field}": {value}{comma}{rest}'.encode())


HUGE = [
    ("/v1/completions", "prompt", ["a"] * 200_000),
    ("/v1/completions", "prompt", [[1]] * 150_000),
    ("/v1/completions", "prompt", [1] * 300_000),
    ("/v1/completions", "bad_words", ["a"] * 200_000),
    ("/v1/completions", "stop", ["a"] * 200_000),
    ("/v1/completions", "stop_token_ids", [1] * 300_000),
    ("/v1/completions", "logit_bias", {str(token): 0 for token in range(90_000)}),
    ("/v1/completions", "logprobs", [1] * 300_000),
    ("/v1/completions", "stream_options", {f"x{index}": 0 for index in range(80_000)}),
    ("/v1/completions", "user", ["a"] * 200_000),
    ("/v1/completions", "x" * 900_000, 1),
    ("/v1/completions", "temperature", "x" * 900_000),
    ("/v1/completions", "model", ["x"] * 200_000),
    ("/v1/chat/completions", "messages", [{}] * 300_000),
    ("/v1/chat/completions", "messages", MESSAGES * 20_000),
    ("/v1/chat/completions", "messages", [{"role": "user", "content": [{}] * 300_000}]),
    ("/v1/chat/completions", "messages", [{"role": "x" * 900_000, "content": ""}]),
    ("/v1/chat/completions", "tools", [{}] * 300_000),
    ("/v1/chat/completions", "chat_template_kwargs", {f"x{index}": 0 for index in range(80_000)}),
    ("/v1/chat/completions", "chat_template_kwargs", {"x": [0] * 300_000}),
    ("/tokenize", "prompt", ["a"] * 200_000),
    ("/detokenize", "tokens", [10**6] * 120_000),
    ("/detokenize", "tokens", ["a"] * 200_000),
]


@pytest.mark.parametrize(("path", "field", "value"), HUGE, ids=lambda value: str(value)[:24])
def test_huge_values_are_refused_by_name(cluster: Cluster, path: str, field: str, value: Any) -> None:
    error = refused(cluster, path, {**ROUTES[path], field: value})
    assert error["param"].startswith(field[:80])


def test_a_huge_model_name_is_a_model_that_is_not_there(cluster: Cluster) -> None:
    for path, body in ROUTES.items():
        assert refused(cluster, path, {**body, "model": "x" * 900_000}, 404)["code"] == "model_not_found"


def test_null_is_the_default_of_every_field(cluster: Cluster) -> None:
    schemas = cluster.http.get("/openapi.json").json()["components"]["schemas"]
    names = ("CompletionRequest", "ChatRequest", "TokenizeTextRequest", "DetokenizeRequest")
    for (path, body), name in zip(ROUTES.items(), names, strict=True):
        nulls = dict.fromkeys(schemas[name]["properties"])
        assert len(nulls) > len(body)
        assert cluster.http.post(path, json={**nulls, **body}).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_the_content_type_must_be_json(cluster: Cluster, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    accepted = {"content-type": "Application/JSON ; charset=utf-8"}
    for path, good in ROUTES.items():
        body = json.dumps(good).encode()
        response = cluster.http.post(path, content=body, headers=headers)
        assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]
        assert cluster.http.post(path, content=body, headers=accepted).status_code == 200


@pytest.mark.parametrize("size", [1_000_001, 3_900_000])
def test_large_bodies_are_refused_whether_declared_or_chunked(cluster: Cluster, size: int) -> None:
    body = b'{"prompt": "' + b"x" * size + b'"}'
    for path in ROUTES:
        assert refused(cluster, path, body, 413)["message"].startswith("the body is larger")
        chunks = (body[start : start + 65536] for start in range(0, len(body), 65536))
        headers = {"content-type": "application/json"}
        assert cluster.http.post(path, content=chunks, headers=headers).status_code == 413


def test_a_huge_declared_length_is_refused_before_the_body_is_read(cluster: Cluster) -> None:
    for path in ROUTES:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        answer = exchange(cluster.url, f"{head}Content-Length: {10**12}\r\n\r\n")
        assert answer.status == 413 and answer.error


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_is_refused_with_true_counts_before_any_stream(cluster: Cluster, stream: bool) -> None:
    error = refused(cluster, "/v1/completions", {"prompt": "x" * 450, "stream": stream})
    assert "450 tokens" in error["message"] and "400" in error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = refused(cluster, "/v1/completions", {"prompt": "x" * 390, "max_tokens": 11, "stream": stream})
    assert all(count in error["message"] for count in ("390", "11", "401", "400")) and error["param"] == "max_tokens"
    error = refused(cluster, "/v1/chat/completions", {"messages": MESSAGES * 50, "stream": stream})
    assert error["param"] == "messages"
    refused(cluster, "/v1/completions", {"prompt": "x", "max_tokens": 2**70, "stream": stream})


def test_exactly_what_fits_is_accepted(cluster: Cluster) -> None:
    body = {"prompt": "x" * 390, "max_tokens": 10}
    assert cluster.http.post("/v1/completions", json=body).json()["usage"]["total_tokens"] == 400


def test_stream_options_without_stream(cluster: Cluster) -> None:
    body = {"prompt": "x", "stream_options": {"include_usage": True}}
    assert refused(cluster, "/v1/completions", body)["param"] == "stream_options"


def test_unknown_models_and_paths(cluster: Cluster) -> None:
    error = refused(cluster, "/v1/completions", {"prompt": "x", "model": "gpt\x00-5"}, 404)
    assert error["code"] == "model_not_found" and "tiny/model" in error["message"]
    with pytest.raises(openai.NotFoundError):
        cluster.openai.chat.completions.create(model="other", messages=MESSAGES)  # type: ignore[arg-type]
    assert refused(cluster, "/v1/nothing", {}, 404)["message"]
    response = cluster.http.get("/v1/completions")
    assert response.status_code == 405 and response.json()["error"]["message"]
    assert cluster.http.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status"), [("invalid", 400), ("overloaded", 429), ("unavailable", 503), ("internal", 500)]
)
def test_an_engine_that_refuses_has_its_status(cluster: Cluster, kind: str, status: int, stream: bool) -> None:
    cluster.script(lambda submit: Answer([], failure=(kind, "no, because")))
    response = cluster.http.post("/v1/completions", json={"prompt": ["x", "y"], "stream": stream})
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": "no, because",
        "type": {400: "invalid_request_error", 429: "rate_limit_error", 503: "unavailable_error"}.get(
            status, "internal_error"
        ),
        "param": None,
        "code": kind,
    }
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_a_failure_in_mid_stream_is_an_error_event_and_the_end(cluster: Cluster) -> None:
    steps = [(token,) for token in ids("ab")]
    cluster.script(lambda submit: Answer(steps, failure=("internal", "the node broke")))
    text = cluster.http.post("/v1/completions", json={"prompt": "x", "stream": True}).text
    last = text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the node broke"
    assert "[DONE]" not in text and '"text":"b"' in text
    chunks = cluster.openai.chat.completions.create(model="tiny/model", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    with pytest.raises(openai.APIError, match="the node broke"):
        for _ in chunks:
            pass


def test_one_failed_prompt_of_several_frees_the_others(cluster: Cluster) -> None:
    bad = ids("b")[0]
    cluster.script(
        lambda submit: Answer([], failure=("invalid", "b")) if submit.prompt_ids == (bad,) else Answer([(0,)] * 9, None)
    )
    response = cluster.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert response.status_code == 400
    wait_until(lambda: len(cluster.aborted) == 2, "the other two to be aborted")


def test_allowed_ids_times_choices_are_bounded(cluster: Cluster) -> None:
    """Each choice carries the ids to its node: a small body must not become gigabytes of messages."""
    body = {"prompt": ["x"] * 128, "n": 2, "allowed_token_ids": list(range(5000)), "max_tokens": 1}
    error = refused(cluster, "/v1/completions", body)
    assert error["param"] == "allowed_token_ids" and "256 choices" in error["message"]


def test_two_names_of_one_limit_must_agree(cluster: Cluster) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 2}
    error = refused(cluster, "/v1/chat/completions", body)
    assert error["param"] == "max_tokens" and "max_completion_tokens" in error["message"]
    answer = cluster.http.post("/v1/chat/completions", json={**body, "max_tokens": 2})
    assert answer.json()["usage"]["completion_tokens"] == 2
