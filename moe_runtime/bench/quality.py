"""How near a running server's model is to another: perplexity of a text, and agreement with given tokens.

Both score a prompt through the API (echo, logprobs, max_tokens 0), so they judge what is really served.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 600


@dataclass(frozen=True)
class ScoredTokens:
    """Of each token after the first: its log-probability, and whether it was the most probable one."""

    logprobs: tuple[float, ...]
    best: tuple[bool, ...]


def score(url: str, token_ids: Sequence[int]) -> ScoredTokens:
    """Score a text of token ids. Raises RuntimeError with the server's answer when it refuses."""
    body = {"prompt": list(token_ids), "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    answer = _post(url, "/v1/completions", body)
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    own = [entry[str(token)] for entry, token in zip(entries, token_ids[1:], strict=True)]
    return ScoredTokens(tuple(one["logprob"] for one in own), tuple(one["rank"] == 1 for one in own))


def perplexity(url: str, token_ids: Sequence[int]) -> float:
    """exp of the mean negative log-probability of all tokens but the first."""
    logprobs = score(url, token_ids).logprobs
    return math.exp(-sum(logprobs) / len(logprobs))


def agreement(url: str, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Teacher-forced: the share of all continuations' tokens that the model, given what is before, finds most probable.

    texts: (prompt ids, continuation ids), usually another model's greedy text.
    """
    hits = total = 0
    for prompt, continuation in texts:
        best = score(url, [*prompt, *continuation]).best[-len(continuation) :]
        hits += sum(best)
        total += len(best)
    return hits / total


def tokenize(url: str, text: str) -> list[int]:
    """The server's own token ids of a text."""
    tokens: list[int] = _post(url, "/tokenize", {"prompt": text})["tokens"]
    return tokens


def _post(url: str, path: str, body: dict[str, object]) -> dict[str, Any]:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {content.decode(errors='replace')}")
    answer: dict[str, Any] = json.loads(content)
    return answer
