"""This runtime, split and unsplit, over HTTP, against transformers' batched generate: same prompts, same cores, in
turn.

    python benchmarks/bench_serving.py                 # about 15 minutes
    python benchmarks/bench_serving.py --quick         # one turn, fewer peers

One dtype after the other, all peers of a dtype stay loaded and wait asleep while one of them works. Figures are
medians over the turns; tokens per second counts output tokens over the wall clock, prefill included. The yardsticks:
transformers' best setting, and the unsplit runtime in the same dtype.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import AutoTokenizer

from moe_runtime.bench.load import run_load, tokens_per_second
from moe_runtime.bench.report import Row, print_table, write_report
from moe_runtime.bench.server_process import running_server

MODEL = Path("build/models/demo")
TEXTS = ("README.md", "docs/architecture.md")
Prompts = Sequence[Sequence[int]]


@dataclass
class Figures:
    """What one peer did at one level of concurrency, a value per turn."""

    tokens_per_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)


class Peer(Protocol):
    def run(self, prompts: Prompts, tokens: int, figures: Figures) -> None: ...


@dataclass
class Server:
    """A cluster of ours."""

    url: str

    def run(self, prompts: Prompts, tokens: int, figures: Figures) -> None:
        outcomes = run_load(self.url, prompts, tokens)
        figures.tokens_per_s.append(tokens_per_second(outcomes))
        figures.ttft_s.append(statistics.median(outcome.ttft_s for outcome in outcomes))
        figures.itl_s.append(statistics.median(outcome.itl_s or 0.0 for outcome in outcomes))


@dataclass
class Transformers:
    """benchmarks/transformers_peer.py, asked over its standard input."""

    process: "subprocess.Popen[str]"

    def run(self, prompts: Prompts, tokens: int, figures: Figures) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        figures.tokens_per_s.append(answer["tokens"] / answer["seconds"])

    def answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def transformers_peer(dtype: str, experts: str) -> Iterator[Transformers]:
    command = [sys.executable, "benchmarks/transformers_peer.py", str(MODEL), dtype, experts]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        peer = Transformers(process)
        peer.answer()
        yield peer
    finally:
        process.kill()
        process.wait()


def start_peers(stack: ExitStack, dtype: str, configs: Sequence[str], experts: Sequence[str]) -> dict[str, Peer]:
    peers: dict[str, Peer] = {}
    for config in configs:
        overrides = [f"model.dtype={dtype}", "kv_cache.memory_fraction=0.05"]
        server = stack.enter_context(running_server(Path(f"configs/{config}.yaml"), overrides))
        peers[f"{config} {dtype}"] = Server(server.url)
    for implementation in experts:
        peers[f"transformers {dtype} {implementation}"] = stack.enter_context(transformers_peer(dtype, implementation))
    return peers


def make_prompts(count: int, length: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "\n".join(Path(name).read_text(encoding="utf-8") for name in TEXTS)
    ids = tokenizer(text)["input_ids"]
    if len(ids) < count * length:
        raise SystemExit(f"{' and '.join(TEXTS)} have {len(ids)} tokens, {count * length} are needed")
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def rows(figures: dict[tuple[str, int], Figures], levels: Sequence[int]) -> Iterator[Row]:
    for level in levels:
        speed = {peer: statistics.median(f.tokens_per_s) for (peer, n), f in figures.items() if n == level}
        theirs = {peer: value for peer, value in speed.items() if peer.startswith("transformers")}
        best = max(theirs, key=lambda peer: theirs[peer]) if theirs else ""
        for peer, value in speed.items():
            case = f"{peer}, {level} request{'s' if level > 1 else ''}"
            unsplit = f"unsplit {peer.split()[-1]}"
            yield Row(case, "output tokens/s", value, "1/s", best, value / speed[best] if best else None)
            if peer.startswith("transformers"):
                continue
            if unsplit in speed and peer != unsplit:
                yield Row(case, "output tokens/s", value, "1/s", unsplit, value / speed[unsplit])
            yield Row(case, "TTFT", 1000 * statistics.median(figures[peer, level].ttft_s), "ms")
            yield Row(case, "ITL", 1000 * statistics.median(figures[peer, level].itl_s), "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--configs", nargs="*", default=["unsplit", "1a1f", "demo"])
    parser.add_argument("--experts", nargs="*", default=["grouped_mm", "eager"], help="transformers' implementations")
    parser.add_argument("--quick", action="store_true", help="one turn of half the tokens, grouped_mm alone")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.new_tokens, arguments.experts = 1, 32, ["grouped_mm"]
    prompts = make_prompts(max(arguments.requests), arguments.prompt_tokens)
    figures: dict[tuple[str, int], Figures] = defaultdict(Figures)
    for dtype in arguments.dtypes:
        with ExitStack() as stack:
            peers = start_peers(stack, dtype, arguments.configs, arguments.experts)
            for peer in peers.values():
                peer.run(prompts[:1], 4, Figures())
            for turn in range(arguments.turns):
                for level in arguments.requests:
                    for name, peer in peers.items():
                        peer.run(prompts[:level], arguments.new_tokens, figures[name, level])
                        speed = figures[name, level].tokens_per_s[-1]
                        print(f"turn {turn}: {name}, {level}: {speed:.1f} tokens/s", flush=True)
    table = list(rows(figures, arguments.requests))
    print_table(
        f"{arguments.prompt_tokens}-token prompts, {arguments.new_tokens} new tokens, medians of {arguments.turns}",
        table,
    )
    print(write_report("serve", table, " ".join(sys.argv)))


if __name__ == "__main__":
    main()
