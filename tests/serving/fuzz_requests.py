"""Requests of random shape: valid ones with any mix of parameters, and ones that must be refused."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.serving.server import MODEL
from tests.serving.wire import CHAT, COMPLETIONS

Draw = random.Random
Body = dict[str, Any]
VOCAB = 512


@dataclass(frozen=True)
class Request:
    """A request; refused: the status and param it must be answered with, None when it is valid."""

    path: str
    body: Any
    refused: tuple[int, str | None] | None = None


_PROMPTS = (
    "The committee met twice in the spring",
    "x",
    "Příliš žluťoučký 🦙 kůň",
    "Each function returns a list of tuples; the first item is the key. " * 2,
    '\x00\u2028"\\',
    [5, 300, 17, 411, 90, 33],
    ["one prompt", "and another of more tokens", "3"],
    [[260, 261, 262], [400, 20]],
)
_MESSAGES = (
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Ahoj 🦙"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c" * 60}],
)
# Each field with the chance that a request has it, and a valid value.
_SHARED: dict[str, tuple[float, Callable[[Draw], Any]]] = {
    "top_p": (0.3, lambda draw: draw.choice([0.2, 0.7, 0.95, 1])),
    "top_k": (0.3, lambda draw: draw.choice([-1, 1, 3, 40, 9_999_999])),
    "min_p": (0.2, lambda draw: draw.choice([0, 0.05, 0.5, 1])),
    "presence_penalty": (0.2, lambda draw: draw.choice([-2, -0.5, 0.7, 2])),
    "frequency_penalty": (0.2, lambda draw: draw.choice([-2, -0.5, 0.7, 2])),
    "repetition_penalty": (0.2, lambda draw: draw.choice([0.5, 0.9, 1.3, 2])),
    "logit_bias": (0.2, lambda draw: {str(draw.randrange(VOCAB)): draw.uniform(-100, 100) for _ in range(5)}),
    "allowed_token_ids": (0.1, lambda draw: draw.sample(range(VOCAB), 30)),
    "bad_words": (0.2, lambda draw: draw.sample(["a", " the", "th", "mall", "é", "number"], 2)),
    "stop": (0.3, lambda draw: draw.choice(["e", ["the", "r", "\n"], ["never comes", " number"], "\ufffd"])),
    "stop_token_ids": (0.2, lambda draw: draw.sample(range(VOCAB), 20)),
    "include_stop_str_in_output": (0.2, lambda draw: True),
    "ignore_eos": (0.3, lambda draw: draw.random() < 0.5),
    "skip_special_tokens": (0.2, lambda draw: False),
    "n": (0.2, lambda draw: draw.randint(1, 3)),
    "truncate_prompt_tokens": (0.1, lambda draw: draw.choice([-1, 1, 4])),
    "user": (0.1, lambda draw: "somebody"),
}


def valid_request(draw: Draw) -> Request:
    """One whose answer is determined: greedy, or with a seed."""
    most = draw.randint(1, 24)
    body: Body = {"model": MODEL, "max_tokens": most, "seed": draw.randrange(-(2**63), 2**63)}
    body["temperature"] = draw.choice([0, 0, 0.7, 1, 1.5])
    body |= {name: make(draw) for name, (chance, make) in _SHARED.items() if draw.random() < chance}
    if draw.random() < 0.2:
        body["min_tokens"] = draw.randint(0, most)
    return _chat(draw, body) if draw.random() < 0.35 else _completion(draw, body)


def _completion(draw: Draw, body: Body) -> Request:
    body["prompt"] = draw.choice(_PROMPTS)
    if draw.random() < 0.3:
        body["logprobs"] = draw.randint(0, 3)
    if draw.random() < 0.2:
        body["echo"] = True
        body["max_tokens"] = draw.choice([0, body["max_tokens"]]) if "min_tokens" not in body else body["max_tokens"]
    if draw.random() < 0.15:
        body["prompt_logprobs"] = draw.randint(0, 2)
    return Request(COMPLETIONS, body)


def _chat(draw: Draw, body: Body) -> Request:
    body["messages"] = draw.choice(_MESSAGES)
    if draw.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": draw.randint(0, 3)}
    if draw.random() < 0.2:
        body["messages"] = [*body["messages"], {"role": "assistant", "content": "It begins"}]
        body["continue_final_message"] = True
    return Request(CHAT, body)


# What breaks a valid request of either endpoint, by the field that is named.
_BREAKS: tuple[tuple[str, Any], ...] = (
    ("temperature", -0.5), ("temperature", 999999), ("temperature", "hot"), ("temperature", True),
    ("top_p", 0), ("top_p", -1), ("top_p", 1.01), ("top_k", 0), ("top_k", -2), ("top_k", 2.5),
    ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", "1"),
    ("repetition_penalty", 0), ("repetition_penalty", 2.5), ("logit_bias", {"512": 1}), ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}), ("logit_bias", [5]), ("allowed_token_ids", []), ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", [-1]), ("bad_words", [""]), ("bad_words", "a"), ("bad_words", ["a"] * 257), ("seed", 2**63),
    ("seed", 0.5), ("n", 0), ("n", 10_000), ("stop", ""), ("stop", ["x"] * 17), ("stop", [1]), ("stop", {"a": 1}),
    ("stop_token_ids", [VOCAB]), ("stop_token_ids", ["5"]), ("stop_token_ids", [1] * 129), ("max_tokens", -1),
    ("max_tokens", "5"), ("max_tokens", 1_000_000), ("min_tokens", 100_000), ("truncate_prompt_tokens", 0),
    ("prompt_logprobs", 21), ("timeout", 0), ("timeout", -1), ("stream", "yes"), ("stream", 1),
    ("use_beam_search", True), ("response_format", {"type": "json_object"}), ("guided_regex", "a+"), ("best_of", 3),
    ("unheard_of", 1), ("temprature", None), ("user", 5),
)  # fmt: skip
_BREAKS_OF: dict[str, tuple[tuple[str, Any], ...]] = {
    COMPLETIONS: (
        ("prompt", ""), ("prompt", [""]), ("prompt", []), ("prompt", [[]]), ("prompt", [VOCAB]), ("prompt", [-1]),
        ("prompt", 5), ("prompt", None), ("prompt", ["a", [1]]), ("prompt", ["x"] * 129), ("prompt", "x y " * 500),
        ("logprobs", 21), ("logprobs", True), ("echo", "no"), ("suffix", "x"), ("messages", []),
    ),
    CHAT: (
        ("messages", []), ("messages", None), ("messages", "x"), ("messages", [5]), ("messages", [{"role": "user"}]),
        ("messages", [{"role": "nobody", "content": "x"}]), ("messages", [{"role": "user", "content": "x y " * 500}]),
        ("top_logprobs", 21), ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("prompt", "x"),
    ),
}  # fmt: skip
_MALFORMED = (
    b"", b"{", b"null", b"[]", b'"str"', b"5", b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 5000, b'{"temperature": Infinity}',
)  # fmt: skip


def invalid_request(draw: Draw) -> Request:
    """A valid one with a single fault, or no request at all."""
    kind = draw.random()
    path = draw.choice([COMPLETIONS, CHAT])
    if kind < 0.1:
        return Request(path, draw.choice(_MALFORMED), (400, None))
    if kind < 0.15:
        return Request("/v1/nothing", {}, (404, None))
    if kind < 0.2:
        return Request(path, None, (405, None))
    request = valid_request(draw)
    if kind < 0.3:
        return Request(request.path, {**request.body, "model": "other"}, (404, "model"))
    field, value = draw.choice(_BREAKS + _BREAKS_OF[request.path])
    body = {**request.body, field: value}
    # A second fault could be found first.
    for other in ("truncate_prompt_tokens", "min_tokens", "continue_final_message"):
        if other != field:
            body.pop(other, None)
    if field == "max_tokens":
        body.pop("echo", None)
    if field == "prompt_logprobs":
        body.pop("stream", None)
    if field == "top_logprobs":
        body["logprobs"] = True
    return Request(request.path, body, (400, field))
