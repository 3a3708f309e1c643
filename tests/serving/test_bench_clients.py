"""The clients of benchmarks/bench_gateway.py take every token, by either way, and say so when they cannot."""

import pytest

from moe_runtime.bench.direct import DirectClient
from moe_runtime.bench.stream_load import run_streams
from tests.serving.reference import Reference
from tests.serving.server import CAPACITY, Server

PROMPTS = [f"prompt number {index}" for index in range(8)]
TOKENS = 10


def test_both_ways_bring_every_token(server: Server, reference: Reference) -> None:
    (port,) = server.nodes["a0"].listening_ports
    cpu_s = {name: node.cpu_s for name, node in server.nodes.items()}
    with DirectClient(f"tcp://127.0.0.1:{port}", timeout_s=30) as engine:
        direct = engine.run([reference.ids(prompt) for prompt in PROMPTS], TOKENS)
    streams = run_streams(server.url, PROMPTS, TOKENS, timeout_s=60)
    assert direct.tokens == streams.tokens == len(PROMPTS) * TOKENS
    assert direct.tokens_per_s > 0 and streams.client_cpu_s > 0
    assert server.nodes["a0"].cpu_s > cpu_s["a0"]


def test_a_refused_request_is_an_error_either_way(server: Server) -> None:
    (port,) = server.nodes["a0"].listening_ports
    with (
        DirectClient(f"tcp://127.0.0.1:{port}", timeout_s=30) as engine,
        pytest.raises(RuntimeError, match="refused"),
    ):
        engine.run([[5] * CAPACITY], TOKENS)
    with pytest.raises(RuntimeError, match="400 Bad Request"):
        run_streams(server.url, ["x " * CAPACITY], TOKENS, timeout_s=60)
