"""Asking the gateway over raw HTTP, and putting a stream's chunks together to what the whole answer would be."""

import json
from typing import Any

import httpx
from conftest import Cluster

MODEL = "tiny/model"
MESSAGES = [{"role": "user", "content": "x"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def strict_json(text: str | bytes) -> Any:
    """What RFC 8259 allows and no more."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [strict_json(line.removeprefix("data: ")) for line in lines[:-1]]


def stream(cluster: Cluster, path: str, **body: Any) -> list[Any]:
    return events(cluster.http.post(path, json={"model": MODEL, "stream": True, **body}))


def whole(cluster: Cluster, path: str, **body: Any) -> Any:
    response = cluster.http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return strict_json(response.content)


def refused(cluster: Cluster, path: str, **body: Any) -> Any:
    """The error of a 400 that reached no engine."""
    before = len(cluster.submitted)
    response = cluster.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert len(cluster.submitted) == before
    return response.json()["error"]


def joined(chunks: list[Any]) -> list[Any]:
    """The choices that a stream adds up to, each with one role (chat) and one finish."""
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"finish_reason": None, "logprobs": None})
            assert choice["finish_reason"] is None, "more after the finish"
            _add(choice, part)
    for choice in choices.values():
        assert choice["finish_reason"] is not None
    return [choices[index] for index in sorted(choices)]


def _add(choice: Any, part: Any) -> None:
    choice.update(index=part["index"], finish_reason=part["finish_reason"], stop_reason=part["stop_reason"])
    if "text" in part:
        choice["text"] = choice.get("text", "") + part["text"]
    else:
        message = choice.setdefault("message", {"refusal": None})
        assert ("role" in part["delta"]) == ("role" not in message), "one role, in the first chunk"
        message.update({name: message.get(name, "") + text for name, text in part["delta"].items()})
    if part["logprobs"] is not None:
        seen = choice["logprobs"] or {}
        choice["logprobs"] = {
            name: None if values is None else seen.get(name, []) + values for name, values in part["logprobs"].items()
        }


def both(cluster: Cluster, path: str, **body: Any) -> list[Any]:
    """The choices of the whole answer, which the stream must add up to."""
    choices = whole(cluster, path, **body)["choices"]
    streamed = joined(stream(cluster, path, **body))
    for choice, other in zip(choices, streamed, strict=True):
        empty = choice["logprobs"] is not None and not any(choice["logprobs"].values())
        assert {**other, "logprobs": choice["logprobs"] if empty else other["logprobs"]} == choice
    return choices
