"""The controller's side of protocol/control.py for one gateway, and that gateway as a real process."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from moe_runtime.config import ClusterConfig, Config, GatewayConfig, ModelConfig
from moe_runtime.models.spec import ModelSpec, RopeSpec
from moe_runtime.protocol.control import (
    ClusterStats,
    Fatal,
    FromController,
    Heartbeat,
    Hello,
    Peers,
    RequestAddress,
    Sample,
    Serving,
    ToController,
    Welcome,
    decode_to_controller,
    encode,
)

STATS_EVERY_S = 0.1
WAIT_S = 30.0
# Names of the model: as published, with every character that means something in a URL, and in another script.
ALIASES = ("tiny", "a b/c?d#e%2F&f=g+h", "模型/日本🦙", "x/../y")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


def make_config(drain_timeout_s: float = 10.0, **gateway: Any) -> Config:
    """gateway: what differs from the test's usual section."""
    return Config(
        model=ModelConfig(path="unused", served_name="tiny/model", aliases=ALIASES),
        cluster=ClusterConfig(heartbeat_s=0.1, drain_timeout_s=drain_timeout_s, startup_timeout_s=60.0),
        gateway=GatewayConfig(**{"port": 0, "max_body_bytes": 1_000_000, "max_tokens_default": 24, **gateway}),
    )


def make_spec(vocab: int, eos_ids: tuple[int, ...]) -> ModelSpec:
    return ModelSpec(
        family="mixtral",
        vocab=vocab,
        hidden=8,
        heads=1,
        kv_heads=1,
        head_dim=8,
        max_context=512,
        layers=(),
        rope=RopeSpec((1.0,)),
        norm_eps=1e-5,
        attention_scale=1.0,
        eos_ids=eos_ids,
    )


class FakeController:
    """Answers Hello with Welcome and Peers at once, reports fixed samples, and keeps all it hears."""

    def __init__(self, config: Config, model_dir: Path, spec: ModelSpec, peers: tuple[RequestAddress, ...]) -> None:
        self.heard: list[ToController] = []
        self.stats = {"a0": (Sample("kv_usage_ratio", "gauge", 0.25), Sample("preemptions_total", "counter", 3.0))}
        self.silent = False
        self._first_answers = (
            Welcome(
                config=config,
                model_dir=str(model_dir),
                spec=msgspec.msgpack.encode(spec),
                fingerprint=1,
                placement=None,
                store_host="127.0.0.1",
                store_port=1,
                run_dir="unused",
                threads=1,
                index=0,
            ),
            Peers(attention=peers),
        )
        self._outbox: queue.SimpleQueue[FromController] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def of(self, kind: type[ToController]) -> list[ToController]:
        return [message for message in self.heard if isinstance(message, kind)]

    def send(self, message: FromController) -> None:
        self._outbox.put(message)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(10)
        self._context.term()

    def _run(self) -> None:
        next_stats = 0.0
        while not self._stopping.is_set():
            if self._socket.poll(10):
                sender, frame = self._socket.recv_multipart()
                assert sender == b"gateway0"
                self.heard.append(decode_to_controller(frame))
                if isinstance(self.heard[-1], Hello):
                    for answer in self._first_answers:
                        self._outbox.put(answer)
            while not self._outbox.empty():
                self._socket.send_multipart([b"gateway0", encode(self._outbox.get())])
            if self.of(Serving) and not self.silent and time.monotonic() > next_stats:
                next_stats = time.monotonic() + STATS_EVERY_S
                self._socket.send_multipart([b"gateway0", encode(ClusterStats(self.stats))])
        self._socket.close()


class GatewayProcess:
    """`python -m moe_runtime.gateway`, started against a controller, and killed at the end whatever happens."""

    def __init__(self, controller: FakeController, environment: Mapping[str, str] | None = None) -> None:
        """environment: variables beside this process's own."""
        self.controller = controller
        command = [sys.executable, "-m", "moe_runtime.gateway", "--node", "gateway0"]
        self.process = subprocess.Popen(
            [*command, "--controller", controller.endpoint],
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self._log: list[str] = []

    def wait_serving(self) -> str:
        """The URL, once the gateway has said Serving."""
        wait_until(lambda: bool(self.controller.of(Serving)) or self.process.poll() is not None, "Serving")
        serving = self.controller.of(Serving)
        assert serving, self.controller.of(Fatal)
        assert isinstance(serving[0], Serving) and serving[0].url
        return serving[0].url

    def wait_exit(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> str:
        """End it, if it still runs; gives what it logged."""
        if not self._log:
            self.process.kill()
            self._log.append(self.process.communicate()[1].decode())
        return self._log[0]


def last_samples(controller: FakeController) -> dict[str, float]:
    """The gateway's samples in its newest heartbeat, summed over labels."""
    heartbeat = controller.of(Heartbeat)[-1]
    assert isinstance(heartbeat, Heartbeat)
    totals: dict[str, float] = {}
    for sample in heartbeat.samples:
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
