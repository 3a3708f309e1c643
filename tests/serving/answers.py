"""Answers in one shape, whether they came whole or in events, so that they can be compared."""

import math
from collections.abc import Sequence
from typing import Any

Answer = dict[str, Any]
# How far log-probabilities of the same tokens may be apart: other batches round otherwise.
TOLERANCE = 1e-4


def whole_answer(body: Any) -> Answer:
    """The parts of a whole answer that a request determines."""
    prompt = {key: body[key] for key in ("prompt_logprobs",) if key in body}
    return {"choices": [_plain(choice) for choice in body["choices"]], "usage": body["usage"], **prompt}


def streamed_answer(events: Sequence[Any]) -> Answer:
    """What the events of a stream with include_usage say together. They must finish each choice once, and last."""
    *chunks, last = events
    assert last["choices"] == [] and last["usage"], last
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk["usage"] is None, chunk
        (piece,) = chunk["choices"]
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": None})
        assert choice.get("finish_reason") is None, f"a chunk after the finish: {chunk}"
        plain = _plain(piece)
        choice["text"] += plain.pop("text")
        choice["logprobs"] = _joined(choice["logprobs"], plain.pop("logprobs"))
        choice |= plain
    return {"choices": [choices[index] for index in sorted(choices)], "usage": last["usage"]}


def same(one: Any, other: Any) -> bool:
    """Equality with TOLERANCE for numbers that are not counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE)
    return one == other


def _plain(piece: dict[str, Any]) -> dict[str, Any]:
    """A choice of either endpoint, whole or in part: its text by one name, no scores as None."""
    plain = dict(piece)
    if "message" in plain or "delta" in plain:
        message = plain.pop("message", None) or plain.pop("delta")
        plain["text"] = message.get("content") or ""
    if plain["logprobs"] is not None and not any(plain["logprobs"].values()):
        plain["logprobs"] = None
    return plain


def _joined(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    if one is None or other is None:
        return one or other
    return {key: one[key] + other[key] if isinstance(one[key], list) else one[key] for key in one}
