"""Times one layer's experts by strategy: the tables of docs/performance.md, and build/bench/grouped_mlp.json.

    python benchmarks/bench_grouped_mlp.py [--dtypes float32 bfloat16] [--threads 1 2] [--tokens 1 4 16 64 256]

The shapes are the demo model's (hidden 576, 32 experts of 384, top-4). Each round walks over several layers' weights,
more than the caches hold, and strategies take turns within a round; the best round counts, since other load only slows.
Legend: T tokens, K picks, H hidden, N experts, I intermediate, R rows sorted by expert.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.bench.report import Row, write_report
from moe_runtime.kernels.grouped_mlp import ExpertBank, grouped_mlp
from moe_runtime.kernels.linear import can_pack

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 576, 384, 32, 4
LAYERS = 6
BASELINE = "F.linear each"
Strategy = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Layers:
    """The same random weights in both layouts."""

    def __init__(self, dtype: torch.dtype) -> None:
        scale = HIDDEN**-0.5
        self.plain = [
            ExpertBank(
                (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * scale).to(dtype),
                (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) * scale).to(dtype),
            )
            for _ in range(LAYERS)
        ]
        self.packed = [bank.packed() for bank in self.plain]

    def strategies(self) -> dict[str, Strategy]:
        return {
            "packed (ours)": lambda x, slots, weights, layer: grouped_mlp(x, slots, weights, self.packed[layer]),
            BASELINE: lambda x, slots, weights, layer: grouped_mlp(x, slots, weights, self.plain[layer]),
            "mm(w, x.T) each": lambda x, slots, weights, layer: transposed_each(x, slots, weights, self.plain[layer]),
            "bmm, padded": lambda x, slots, weights, layer: padded_bmm(x, slots, weights, self.plain[layer]),
            "F.grouped_mm": lambda x, slots, weights, layer: torch_grouped(x, slots, weights, self.plain[layer]),
        }


def sorted_rows(slots_TK: Tensor) -> tuple[Tensor, list[int]]:
    flat = slots_TK.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=EXPERTS).tolist()


def combine(x_TH: Tensor, out_RH: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
    out_RH = out_RH * weights_TK.flatten()[order_R, None].to(out_RH.dtype)
    return torch.zeros_like(x_TH).index_add_(0, order_R // TOP_K, out_RH)


def transposed_each(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, bank: ExpertBank) -> Tensor:
    order_R, counts_N = sorted_rows(slots_TK)
    outs = []
    for expert, x_BH in enumerate(x_TH[order_R // TOP_K].split(counts_N)):
        if len(x_BH):
            gate_IB, up_IB = torch.mm(bank.gate_up_N2IH[expert], x_BH.T).chunk(2)
            outs.append(torch.mm(bank.down_NHI[expert], F.silu(gate_IB) * up_IB).T)
    return combine(x_TH, torch.cat(outs), order_R, weights_TK)


def padded_bmm(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, bank: ExpertBank) -> Tensor:
    assert isinstance(bank.gate_up_N2IH, Tensor) and isinstance(bank.down_NHI, Tensor)
    order_R, counts_N = sorted_rows(slots_TK)
    expert_R = slots_TK.flatten()[order_R]
    place_R = torch.arange(len(order_R)) - (torch.tensor(counts_N).cumsum(0) - torch.tensor(counts_N))[expert_R]
    padded = x_TH.new_zeros(EXPERTS, max(counts_N), HIDDEN)
    padded[expert_R, place_R] = x_TH[order_R // TOP_K]
    gate, up = torch.bmm(padded, bank.gate_up_N2IH.transpose(1, 2)).chunk(2, dim=-1)
    out = torch.bmm(F.silu(gate) * up, bank.down_NHI.transpose(1, 2))
    return combine(x_TH, out[expert_R, place_R], order_R, weights_TK)


def torch_grouped(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, bank: ExpertBank) -> Tensor:
    assert isinstance(bank.gate_up_N2IH, Tensor) and isinstance(bank.down_NHI, Tensor)
    order_R, counts_N = sorted_rows(slots_TK)
    ends_N = torch.tensor(counts_N, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    gate_up = F.grouped_mm(x_TH[order_R // TOP_K], bank.gate_up_N2IH.transpose(1, 2), offs=ends_N)
    gate, up = gate_up.chunk(2, dim=-1)
    out_RH = F.grouped_mm(F.silu(gate) * up, bank.down_NHI.transpose(1, 2), offs=ends_N)
    return combine(x_TH, out_RH, order_R, weights_TK)


def best_seconds(strategies: dict[str, Strategy], tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds a layer, the best of `rounds`; also checks that all strategies agree."""
    x_TH = torch.randn(tokens, HIDDEN).to(dtype)
    slots_TK = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
    weights_TK = torch.rand(tokens, TOP_K)
    expected = strategies[BASELINE](x_TH, slots_TK, weights_TK, 0)
    best = dict.fromkeys(strategies, float("inf"))
    for name, strategy in strategies.items():
        error = (strategy(x_TH, slots_TK, weights_TK, 0) - expected).abs().max() / expected.abs().max()
        assert error < 0.03, f"{name} differs by {error:.2g}"
    for _ in range(rounds):
        for name, strategy in strategies.items():
            start = time.perf_counter()
            for layer in range(LAYERS):
                strategy(x_TH, slots_TK, weights_TK, layer)
            best[name] = min(best[name], (time.perf_counter() - start) / LAYERS)
    return best


def batch_invariant(layers: Layers, dtype: torch.dtype) -> dict[str, bool]:
    """For each strategy, whether the first rows come out the same alone and among 64."""
    x_TH = torch.randn(64, HIDDEN).to(dtype)
    slots_TK = torch.rand(64, EXPERTS).topk(TOP_K).indices
    weights_TK = torch.rand(64, TOP_K)
    same = {}
    for name, strategy in layers.strategies().items():
        together = strategy(x_TH, slots_TK, weights_TK, 0)
        alone = [strategy(x_TH[t : t + 1], slots_TK[t : t + 1], weights_TK[t : t + 1], 0) for t in range(16)]
        same[name] = torch.equal(torch.cat(alone), together[:16])
    return same


def measure(dtype: torch.dtype, options: argparse.Namespace) -> list[Row]:
    """One dtype's table, printed as it comes."""
    layers, name = Layers(dtype), str(dtype).removeprefix("torch.")
    same = batch_invariant(layers, dtype)
    print(
        f"\n{name}, ms a layer; packed: {can_pack(torch.empty(1, 1, dtype=dtype))}; a row alone equals it in a batch:"
    )
    print(", ".join(f"{key}: {'yes' if value else 'no'}" for key, value in same.items()))
    print(f"\n| threads | tokens | {' | '.join(same)} |\n|{'---|' * (len(same) + 2)}")
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for tokens in options.tokens:
            best = best_seconds(layers.strategies(), tokens, dtype, options.rounds)
            print(f"| {threads} | {tokens} | {' | '.join(f'{seconds * 1e3:.2f}' for seconds in best.values())} |")
            rows += [
                Row(
                    case=f"{name}, {threads} threads, {tokens} tokens, {key}",
                    metric="one layer's experts",
                    value=seconds * 1e3,
                    unit="ms",
                    against=BASELINE,
                    ratio=seconds / best[BASELINE],
                )
                for key, seconds in best.items()
            ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        rows = [row for dtype in options.dtypes for row in measure(getattr(torch, dtype), options)]
    print(write_report("grouped_mlp", rows, "python benchmarks/bench_grouped_mlp.py"))


if __name__ == "__main__":
    main()
