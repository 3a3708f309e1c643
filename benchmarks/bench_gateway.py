"""What 64 streams through HTTP cost the engine: the same requests straight to the attention node, and through the
gateway, in turn, on one running cluster.

    python benchmarks/bench_gateway.py                # about 10 minutes
    python benchmarks/bench_gateway.py --rounds 1

The ratio is the median of each round's own (HTTP / direct), so that what the machine does meanwhile strikes both. Both
clients take as little from the cores as they can; their processor time is in the table.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from moe_runtime.bench.direct import DirectClient
from moe_runtime.bench.processes import NodeProcess, nodes_of
from moe_runtime.bench.report import Row, print_table, write_report
from moe_runtime.bench.server_process import running_server
from moe_runtime.bench.stream_load import Run, run_streams

CONFIG = Path("configs/unsplit.yaml")
TEXTS = ("README.md", "docs/architecture.md", "docs/performance.md")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Round:
    """Both runs of one round, and the gateway's processor seconds during the second."""

    direct: Run
    http: Run
    gateway_cpu_s: float


def make_prompts(model: Path, count: int, length: int) -> tuple[list[str], list[list[int]]]:
    """Texts of about `length` tokens, and the tokens that the gateway makes of them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("\n".join(Path(name).read_text(encoding="utf-8") for name in TEXTS))["input_ids"]
    if len(ids) < length:
        raise SystemExit(f"{', '.join(TEXTS)} have {len(ids)} tokens, {length} are needed")
    starts = [i * length % (len(ids) - length + 1) for i in range(count)]
    texts = [tokenizer.decode(ids[start : start + length]) for start in starts]
    return texts, [tokenizer(text)["input_ids"] for text in texts]


def request_endpoint(node: NodeProcess) -> str:
    """Where an unsplit attention node takes requests: the only port it listens on."""
    (port,) = node.listening_ports
    return f"tcp://127.0.0.1:{port}"


def measure(url: str, nodes: dict[str, NodeProcess], model: Path, arguments: argparse.Namespace) -> Iterator[Round]:
    texts, prompts = make_prompts(model, arguments.streams, arguments.prompt_tokens)
    gateway = nodes["gateway0"]
    expected = arguments.streams * arguments.new_tokens

    def through_http(new_tokens: int) -> tuple[Run, float]:
        before = gateway.cpu_s
        run = run_streams(url, texts, new_tokens, TIMEOUT_S)
        return run, gateway.cpu_s - before

    with DirectClient(request_endpoint(nodes["a0"]), TIMEOUT_S) as engine:
        engine.run(prompts, 2)
        through_http(2)
        for number in range(arguments.rounds):
            # Whoever comes second finds a warmer machine, so they change places.
            if number % 2:
                http, cpu_s = through_http(arguments.new_tokens)
                direct = engine.run(prompts, arguments.new_tokens)
            else:
                direct = engine.run(prompts, arguments.new_tokens)
                http, cpu_s = through_http(arguments.new_tokens)
            if not direct.tokens == http.tokens == expected:
                raise SystemExit(f"{direct.tokens} and {http.tokens} tokens came, {expected} were asked for")
            yield Round(direct, http, cpu_s)


def rows(rounds: Sequence[Round], streams: int) -> list[Row]:
    http, direct = f"HTTP, {streams} streams", f"direct, {streams} requests"
    ratio = statistics.median(one.http.tokens_per_s / one.direct.tokens_per_s for one in rounds)
    gateway_us = statistics.median(1e6 * one.gateway_cpu_s / one.http.tokens for one in rounds)
    gateway_ms = statistics.median(1e3 * one.gateway_cpu_s / streams for one in rounds)
    share = statistics.median(one.gateway_cpu_s / one.http.seconds for one in rounds)

    def speed(runs: list[Run]) -> float:
        return statistics.median(run.tokens_per_s for run in runs)

    def client_us(runs: list[Run]) -> float:
        return statistics.median(1e6 * run.client_cpu_s / run.tokens for run in runs)

    directs, https = [one.direct for one in rounds], [one.http for one in rounds]
    return [
        Row(direct, "output tokens/s", speed(directs), "1/s"),
        Row(http, "output tokens/s", speed(https), "1/s", "direct", ratio),
        Row(http, "gateway's processor time per token", gateway_us, "us"),
        Row(http, "gateway's processor time per stream", gateway_ms, "ms"),
        Row(http, "gateway's share of a core", share, ""),
        Row(http, "client's processor time per token", client_us(https), "us"),
        Row(direct, "client's processor time per token", client_us(directs), "us"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--model", type=Path, default=Path("build/models/demo"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    overrides = [f"model.path={arguments.model}", f"model.dtype={arguments.dtype}", "kv_cache.memory_fraction=0.05"]
    rounds = []
    with running_server(CONFIG, overrides) as server:
        for one in measure(server.url, nodes_of(server.pid), arguments.model, arguments):
            rounds.append(one)
            print(
                f"round {len(rounds)}: direct {one.direct.tokens_per_s:.1f}, HTTP {one.http.tokens_per_s:.1f} tokens/s,"
                f" gateway {one.gateway_cpu_s:.2f} s of processor time",
                flush=True,
            )
    table = rows(rounds, arguments.streams)
    print_table(
        f"{arguments.prompt_tokens}-token prompts, {arguments.new_tokens} new tokens, medians of {len(rounds)} rounds",
        table,
    )
    print(write_report("gateway", table, " ".join(sys.argv)))


if __name__ == "__main__":
    main()
