"""Requests that take too long, and more of them than there is room for."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from asking import CHAT, COMPLETIONS, MESSAGES, MODEL
from conftest import Cluster
from fake_controller import make_config, wait_until
from fake_engine import Answer, FakeEngine
from own_gateway import gateway
from tiny_tokenizer import ids

LIMIT_S, ROOM = 0.8, 3


def says_then_hangs(engine: FakeEngine, text: str) -> None:
    engine.script = lambda submit: Answer([(token,) for token in ids(text)], None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_without_any_text_in_time_the_status_is_408(cluster: Cluster, stream: bool, path: str) -> None:
    cluster.hold()
    prompt: dict[str, Any] = {"prompt": ["a", "b"]} if path == COMPLETIONS else {"messages": MESSAGES}
    response = cluster.http.post(path, json={**prompt, "timeout": 0.2, "stream": stream})
    assert response.status_code == 408
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "timeout") and "0.2 s" in error["message"]
    wait_until(lambda: not cluster.open and len(cluster.aborted) == len(cluster.submitted), "the nodes to be free")


def test_a_timeout_in_mid_stream_is_an_error_event(cluster: Cluster) -> None:
    for engine in cluster.engines:
        says_then_hangs(engine, "ab")
    text = cluster.http.post(COMPLETIONS, json={"prompt": "x", "timeout": 0.4, "stream": True}).text
    pieces = [json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n")]
    assert [piece["choices"][0]["text"] for piece in pieces[:-1]] == ["a", "b"]
    assert pieces[-1]["error"]["code"] == "timeout"
    wait_until(lambda: len(cluster.aborted) == 1, "the abort")
    chunks = cluster.openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, extra_body={"timeout": 0.4}
    )  # type: ignore[call-overload]
    with pytest.raises(openai.APIError, match=r"0\.4 s"):
        list(chunks)


def test_one_choice_that_hangs_is_enough(cluster: Cluster) -> None:
    hangs = ids("b")[0]
    cluster.script(lambda submit: Answer([(0,)], None if submit.prompt_ids == (hangs,) else "length"))
    response = cluster.http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "timeout": 0.3})
    assert response.status_code == 408
    wait_until(lambda: len(cluster.aborted) == 1 and not cluster.open, "the one to be aborted")


def test_in_time_is_in_time(cluster: Cluster) -> None:
    cluster.hold(False, step_s=0.01)
    response = cluster.http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 10, "timeout": 60})
    assert response.json()["choices"][0]["text"] == "ab" * 5


def test_a_slow_reader_frees_the_node_in_time_and_gets_what_came(cluster: Cluster) -> None:
    """More text than the connection's buffers hold, so that the gateway waits for the client when time is over."""
    tokens = tuple(ids("x" * 1000))
    cluster.script(lambda submit: Answer([tokens] * 20_000, None))
    with cluster.http.stream("POST", COMPLETIONS, json={"prompt": "x", "timeout": 1.0, "stream": True}) as response:
        wait_until(lambda: len(cluster.aborted) == 1, "the abort", timeout_s=10)
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
    assert len(texts) > 1 and set(texts) == {"x" * 1000}


@pytest.mark.parametrize("name", [None, MODEL, "a b/c?d#e%2F&f=g+h", "模型/日本🦙"])
def test_an_answer_has_the_name_that_was_asked_for(cluster: Cluster, name: str | None) -> None:
    shown = name or MODEL
    body = {"model": name, "max_tokens": 2}
    assert cluster.http.post(COMPLETIONS, json={**body, "prompt": "x"}).json()["model"] == shown
    assert cluster.http.post(CHAT, json={**body, "messages": MESSAGES}).json()["model"] == shown
    text = cluster.http.post(COMPLETIONS, json={**body, "prompt": "x", "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n")[:-1]]
    assert {event["model"] for event in events} == {shown}


@pytest.fixture(scope="module")
def small(model_dir: Path) -> Iterator[tuple[str, FakeEngine]]:
    """A gateway with little time and little room."""
    config = make_config(request_timeout_s=LIMIT_S, max_open_requests=ROOM)
    with gateway(model_dir, config) as (process, engine):
        yield process.wait_serving(), engine


def test_the_servers_limit_bounds_every_request(small: tuple[str, FakeEngine]) -> None:
    url, engine = small
    says_then_hangs(engine, "")
    for body in ({}, {"timeout": 50}):
        response = httpx.post(url + COMPLETIONS, json={"prompt": "x", **body}, timeout=30)
        assert response.status_code == 408 and f"{LIMIT_S:g} s" in response.json()["error"]["message"]
    wait_until(lambda: not engine.open, "the engine to be empty")


def test_more_open_texts_than_there_is_room_for_are_refused(small: tuple[str, FakeEngine]) -> None:
    url, engine = small
    says_then_hangs(engine, "")
    held = threading.Thread(target=httpx.post, args=(url + COMPLETIONS,), kwargs={"json": {"prompt": "x", "n": 2}})
    held.start()
    wait_until(lambda: len(engine.open) == 2, "two to be open")
    for path, prompt in ((COMPLETIONS, {"prompt": ["x", "y"]}), (CHAT, {"messages": MESSAGES, "n": 2, "stream": True})):
        response = httpx.post(url + path, json=prompt)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert len(engine.open) == 2
    held.join(30)
    engine.script = lambda submit: Answer([(0,)])
    assert httpx.post(url + COMPLETIONS, json={"prompt": ["x"] * ROOM}).status_code == 200


def test_what_never_has_room_is_the_clients_mistake(small: tuple[str, FakeEngine]) -> None:
    url, _ = small
    for body in ({"prompt": "x", "n": ROOM + 1}, {"prompt": ["x", "y"], "n": 2}):
        response = httpx.post(url + COMPLETIONS, json=body)
        assert response.status_code == 400 and response.json()["error"]["param"] == "n"


def test_a_burst_never_opens_more_than_there_is_room_for(small: tuple[str, FakeEngine]) -> None:
    url, engine = small
    most, statuses = 0, []

    def script(_submit: Any) -> Answer:
        nonlocal most
        most = max(most, len(engine.open) + 1)
        return Answer([(0,)] * 5)

    engine.script, engine.step_s = script, 0.01

    def ask() -> None:
        statuses.append(httpx.post(url + COMPLETIONS, json={"prompt": "x"}, timeout=30).status_code)

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == ROOM and set(statuses) == {200, 429}
    assert httpx.post(url + COMPLETIONS, json={"prompt": "x"}).status_code == 200
