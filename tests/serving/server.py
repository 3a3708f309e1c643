"""The cluster under test, and what must be true of it whenever nobody asks it anything."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from openai import OpenAI

from moe_runtime.bench.processes import NodeProcess, nodes_of
from moe_runtime.bench.server_process import running_server
from moe_runtime.models.demo import write_random_model
from tests.serving.wire import CHAT, COMPLETIONS, Reply, call

MODEL = "tiny"
HEARTBEAT_S = 0.05
BLOCK_SIZE, BLOCKS = 4, 48
CAPACITY = BLOCK_SIZE * BLOCKS
LANES, CHUNK = 2, 16
# What a request holds while it runs, in the gateway and on the nodes.
HELD = (
    "requests_running",
    "requests_waiting",
    "kv_blocks_held",
    "gateway_open_requests",
    "gateway_outstanding_tokens",
)


def tiny_config(model_dir: Path, attention: int = 1, ffn: int = 2) -> dict[str, Any]:
    """Steps and pool so small that prompts are prefilled in chunks, lanes overlap and requests are preempted."""
    return {
        "model": {"path": str(model_dir), "served_name": MODEL, "aliases": ["tiny/alias", "naïve 🦙 model"]},
        "cluster": {"attention_nodes": attention, "ffn_nodes": ffn, "heartbeat_s": HEARTBEAT_S},
        "exchange": {"lanes": LANES, "transport": "shm"},
        "scheduler": {"max_batch_tokens": CHUNK, "max_batch_requests": 8},
        "kv_cache": {"block_size": BLOCK_SIZE, "blocks": BLOCKS},
        "gateway": {"max_tokens_default": 12},
    }


@dataclass(frozen=True)
class Server:
    """A running cluster and clients for it."""

    url: str
    pid: int
    openai: OpenAI

    @property
    def nodes(self) -> dict[str, NodeProcess]:
        return nodes_of(self.pid)

    def call(self, path: str, body: Any = None) -> Reply:
        return call(self.url, path, body)

    def complete(self, **body: Any) -> Any:
        """A completion's whole answer, which must be 200."""
        return self._answer(COMPLETIONS, body)

    def chat(self, **body: Any) -> Any:
        return self._answer(CHAT, body)

    def text(self, prompt: Any, **body: Any) -> str:
        """The text of a completion's first choice; greedy unless told otherwise."""
        return self.complete(prompt=prompt, **{"temperature": 0, **body})["choices"][0]["text"]

    def texts(self, bodies: Sequence[dict[str, Any]]) -> list[str]:
        """Texts of completions that are all sent at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: self.complete(**body), bodies))
        return [answer["choices"][0]["text"] for answer in answers]

    def stream(self, path: str = COMPLETIONS, **body: Any) -> list[Any]:
        return self.call(path, {"model": MODEL, "stream": True, **body}).events

    def refused(self, body: Any, path: str = COMPLETIONS, status: int = 400) -> dict[str, Any]:
        """The error of a request that must be refused with this status."""
        reply = self.call(path, body)
        assert reply.status == status, (reply.status, reply.content[:500])
        return reply.error

    def held(self) -> dict[str, float]:
        """All that requests hold, in the whole cluster, where it is not zero."""
        samples = self.metrics()
        held = {key: samples[key] for key in samples if key.partition("{")[0] in HELD}
        assert {key.partition("{")[0] for key in held} == set(HELD), held
        return {key: value for key, value in held.items() if value}

    def metrics(self) -> dict[str, float]:
        """/metrics by `name{labels}`, without the common prefix."""
        lines = self.call("/metrics").content.decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {key.removeprefix("moe_runtime_"): float(value) for key, _, value in pairs}

    def total(self, name: str) -> float:
        """A metric's sum over nodes and labels."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    def wait_empty(self, timeout_s: float = 30.0) -> None:
        """Wait until nothing is held any more: the nodes' figures are a few heartbeats old, the gateway's are not."""
        time.sleep(3 * HEARTBEAT_S)
        deadline = time.monotonic() + timeout_s
        while held := self.held():
            assert time.monotonic() < deadline, f"still held {timeout_s:g} s after the last request: {held}"
            time.sleep(HEARTBEAT_S)

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        reply = self.call(path, {"model": MODEL, **body})
        assert reply.status == 200, (reply.status, reply.content[:500])
        return reply.json


@contextmanager
def tiny_cluster(folder: Path, model_dir: Path, attention: int = 1, ffn: int = 2) -> Iterator[Server]:
    config = folder / f"{attention}a{ffn}f.yaml"
    config.write_text(yaml.safe_dump(tiny_config(model_dir, attention, ffn)), encoding="utf-8")
    with running_server(config) as running:
        client = OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)
        with client:
            yield Server(running.url, running.pid, client)


def write_tiny_model(folder: Path) -> Path:
    model_dir = folder / "model"
    write_random_model("qwen3_moe", model_dir)
    return model_dir
