"""The demo model in every weight format, split and unsplit, as a server serves it: how near its text is to float32's.

Perplexity is of the bundled text; agreement is teacher-forced, with transformers' fp32 greedy text of the 32 prompts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import pytest

from moe_runtime.bench.processes import nodes_of
from moe_runtime.bench.quality import agreement, perplexity, tokenize
from moe_runtime.bench.server_process import RunningServer, running_server
from tests.cluster.client import openai_client
from tests.cluster.reference import greedy_references

GREEDY_TOKENS = 48
# Perplexity's rise over float32's, rounded to nearest at load. Four-bit formats do better when they are quantized ahead
# (`moe-runtime quantize` calibrates them).
MOST_RISE = {
    "w8a16": 0.005, "w8a8": 0.015, "fp8": 0.02, "fp8-g128": 0.02, "fp8-block": 0.02, "mxfp4": 0.25,
    "w4a16-g32": 0.2, "w4a16-g32-zp": 0.12, "w4a16-g64": 0.25, "w4a16-g64-zp": 0.15,
    "w4a16-g128": 0.35, "w4a16-g128-zp": 0.25,
}  # fmt: skip
SHORT = [("w8a16", 2)]
EVERY = [
    pytest.param(name, ffn, marks=() if (name, ffn) in SHORT else pytest.mark.slow)
    for name in MOST_RISE
    for ffn in (0, 2)
]


@contextmanager
def quantized(name: str | None, ffn: int) -> Iterator[RunningServer]:
    settings = [f"cluster.ffn_nodes={ffn}", "scheduler.max_batch_tokens=512", "kv_cache.blocks=1024"]
    with running_server(Path("configs/demo.yaml"), [*settings, *([f"model.quant={name}"] if name else [])]) as server:
        yield server


@pytest.fixture(scope="module")
def text() -> str:
    return files("moe_runtime.quant.data").joinpath("prose.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def float_perplexity(demo_dir: Path, text: str) -> float:
    with quantized(None, 0) as server:
        return perplexity(server.url, tokenize(server.url, text))


@pytest.mark.parametrize(("name", "ffn"), EVERY)
def test_a_format_serves_and_stays_near_float32(
    name: str, ffn: int, demo_dir: Path, text: str, float_perplexity: float
) -> None:
    references = greedy_references(demo_dir, GREEDY_TOKENS)
    with quantized(name, ffn) as server:
        rise = perplexity(server.url, tokenize(server.url, text)) / float_perplexity - 1
        texts = [(tokenize(server.url, one.prompt), one.token_ids) for one in references]
        agreed = agreement(server.url, texts)
        with openai_client(server.url) as client:
            answer = client.completions.create(model="demo", prompt="The sky is", max_tokens=8, temperature=0)
    print(f"{name}, {ffn} FFN nodes: perplexity {rise:+.2%}, {agreed:.1%} of greedy tokens agree")
    assert answer.choices[0].text.strip()
    assert rise < MOST_RISE[name]
    assert agreed > (0.95 if name == "w8a16" else 0.75)


@pytest.mark.slow
def test_an_ffn_nodes_memory_falls_as_the_format_says(demo_dir: Path) -> None:
    """Resident bytes of the experts' nodes, less those of a node that holds next to nothing, are the tensors' sizes."""
    layers, experts, hidden, intermediate = 30, 32, 576, 384
    numbers = layers * experts * 3 * hidden * intermediate
    per_number = {None: 4.0, "w8a16": 1.0, "w4a16-g64": 0.5 + 2 / 64}
    resident = {}
    for name in per_number:
        with quantized(name, 1) as server:
            resident[name] = nodes_of(server.pid)["f0"].resident_bytes
    for name in ("w8a16", "w4a16-g64"):
        expected = numbers * (per_number[None] - per_number[name])
        fallen = resident[None] - resident[name]
        print(f"{name}: the FFN node takes {fallen / 1e6:.0f} MB less, the tensors {expected / 1e6:.0f} MB")
        assert fallen == pytest.approx(expected, rel=0.05)
