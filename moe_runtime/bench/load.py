"""A closed-loop load over HTTP: N clients at once, each streaming one completion, and what each of them saw."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Outcome:
    """One request as its client saw it, in seconds from the start of the run. token_times: one entry per text chunk."""

    sent_at: float
    done_at: float
    token_times: tuple[float, ...]
    completion_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to first token: the first chunk that carries text."""
        return self.token_times[0] - self.sent_at

    @property
    def itl_s(self) -> float | None:
        """Inter-token latency: (end - first token) / (tokens - 1); undefined for one token."""
        if self.completion_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.completion_tokens - 1)


def run_load(url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Outcome]:
    """Send all prompts (token ids) at once, decoded greedily to max_tokens. Raises RuntimeError if any fails."""
    model = _get(url, "/v1/models")["data"][0]["id"]
    outcomes: list[Outcome | str | None] = [None] * len(prompts)
    start = threading.Barrier(len(prompts))
    origin = time.perf_counter()

    def client(index: int) -> None:
        start.wait(60)
        try:
            outcomes[index] = _complete(url, model, prompts[index], max_tokens, origin)
        except (OSError, ValueError) as error:
            outcomes[index] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=client, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [str(outcome) for outcome in outcomes if not isinstance(outcome, Outcome)]
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(prompts)} requests failed, the first with {failures[0]}")
    return [outcome for outcome in outcomes if isinstance(outcome, Outcome)]


def tokens_per_second(outcomes: Sequence[Outcome]) -> float:
    """Output tokens over the wall clock from the first request sent to the last one done."""
    wall = max(o.done_at for o in outcomes) - min(o.sent_at for o in outcomes)
    return sum(o.completion_tokens for o in outcomes) / wall


def _complete(url: str, model: str, prompt: Sequence[int], max_tokens: int, origin: float) -> Outcome:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = _connection(url)
    sent_at = time.perf_counter() - origin
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
    times, tokens = [], 0
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(event["error"]["message"])
        if event["choices"] and event["choices"][0]["text"]:
            times.append(time.perf_counter() - origin)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    connection.close()
    return Outcome(sent_at, time.perf_counter() - origin, tuple(times), tokens)


def _get(url: str, path: str) -> dict[str, list[dict[str, str]]]:
    connection = _connection(url)
    connection.request("GET", path)
    answer: dict[str, list[dict[str, str]]] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def _connection(url: str) -> HTTPConnection:
    address = urlsplit(url)
    return HTTPConnection(address.hostname or "", address.port, timeout=600)
