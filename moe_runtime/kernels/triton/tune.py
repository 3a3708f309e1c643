"""Finds the fastest tiles on the GPU at hand and writes them to the table that tiles.py reads.

    python -m moe_runtime.kernels.triton.tune --experts 256 --hidden 7168 --intermediate 2048 --picks 8 \\
        --formats w4a16-g64 fp8-block [--linear 9216x4096 ...] [--minutes 10] [--out FILE]

For each product first BLOCK_K (and with it what decides a row's result) is chosen by the time over all numbers of rows,
then the rest for each number of rows. Experts are drawn evenly, so that each gets the mean number of rows.
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from moe_runtime.kernels.triton.experts import left_side, multiply, result_dtype
from moe_runtime.kernels.triton.launch import architecture
from moe_runtime.kernels.triton.measure import median_seconds
from moe_runtime.kernels.triton.sort import sort_picks
from moe_runtime.kernels.triton.tiles import BUCKETS, TABLES, Product, Tile, default_tile, load_table, save_table
from moe_runtime.kernels.triton.weights import WeightStack
from moe_runtime.quant.formats import FORMATS, format_named

# More rows than this are as many blocks of the same kind.
_MOST_ROWS = 2**17
Time = Callable[[Tile], float]


def tune(
    product: Product,
    arch: str,
    timer: Callable[[int], Time],
    deadline: float,
    block_ms: Mapping[str, int] | None = None,
) -> dict[str, Tile]:
    """The table's entry of one product. timer(mean rows) measures a tile; block_ms: BLOCK_M where it is settled."""
    block_k = best_block_k(product, arch, timer, deadline)
    entry = {}
    for mean in BUCKETS:
        start = replace(default_tile(product, mean, arch), block_k=block_k)
        settled = (block_ms or {}).get(str(mean))
        best = search(start, [settled] if settled else None, timer(mean), deadline)
        if best:
            entry[str(mean)] = best
    return entry


def best_block_k(product: Product, arch: str, timer: Callable[[int], Time], deadline: float) -> int:
    """By the product of times over few and many rows: one value must serve them all."""
    total: dict[int, float] = {}
    for mean in (BUCKETS[0], BUCKETS[2], BUCKETS[-2]):
        seconds, start = timer(mean), default_tile(product, mean, arch)
        for block_k in (max(32, start.block_k // 2), start.block_k, start.block_k * 2):
            best = fastest(
                [replace(start, block_k=block_k), replace(start, block_k=block_k, stages=2)], seconds, deadline
            )
            total[block_k] = total.get(block_k, 1.0) * (best[0] if best else float("inf"))
    return min(total, key=lambda key: total[key])


def search(start: Tile, block_ms: list[int] | None, seconds: Time, deadline: float) -> Tile | None:
    """First the tile's sides and its warps, then the stages, then the grid."""
    near = sorted({max(16, start.block_m // 2), start.block_m, min(128, start.block_m * 2)})
    sides = itertools.product(block_ms or near, sorted({start.block_n, 64, 128}), (4, 8))
    best = fastest([replace(start, block_m=m, block_n=n, warps=warps) for m, n, warps in sides], seconds, deadline)
    if best is None:
        return None
    best = fastest([replace(best[1], stages=stages) for stages in (2, 3, 4, 5)], seconds, deadline) or best
    best = fastest([best[1], replace(best[1], persistent=True)], seconds, deadline) or best
    return best[1]


def fastest(tiles: Sequence[Tile], seconds: Time, deadline: float) -> tuple[float, Tile] | None:
    """(seconds, tile) of the fastest that the GPU takes; None where there is none, or no time left."""
    found = []
    for tile in tiles:
        if time.monotonic() > deadline:
            break
        with contextlib.suppress(OutOfResources, PTXASError):
            found.append((seconds(tile), tile))
    return min(found, key=lambda entry: entry[0], default=None)


class Bench:
    """Random weights of one product, and its time with a tile at a mean number of rows an expert."""

    def __init__(self, product: Product, picks: int, device: torch.device, dtype: torch.dtype) -> None:
        self._product, self._picks, self._device, self._dtype = product, picks, device, dtype
        rows = product.n * (2 if product.role == "gate_up" else 1)
        stack = WeightStack(product.format, product.experts, rows, product.k, device)
        fill_random(stack)
        self._weights = stack.operand

    def timer(self, mean_rows: int) -> Time:
        total = min(_MOST_ROWS, mean_rows * self._product.experts)
        tokens = max(1, total // self._picks)
        columns, experts = self._product.k, self._product.experts
        sorted_role = self._product.role != "linear"
        gather = self._product.role == "gate_up"
        count = tokens * self._picks if sorted_role and not gather else tokens
        x = torch.randn(count, columns, device=self._device).to(self._dtype)
        rows = left_side(x, self._weights, gather=gather)
        slots_TK = torch.arange(tokens * self._picks, device=self._device).view(tokens, -1) % experts
        weights_TK = torch.rand(tokens, self._picks, device=self._device)
        outputs = tokens * self._picks if sorted_role else tokens
        out = torch.empty(outputs, self._product.n, dtype=result_dtype(x, self._weights), device=self._device)

        def seconds(tile: Tile) -> float:
            by_expert = sort_picks(slots_TK, experts, tile.block_m) if sorted_role else None
            weighted = weights_TK if self._product.role == "down" else None
            call = multiply(out, rows, self._weights, tile, by_expert, gather, weighted, picks=self._picks)
            return median_seconds(call, self._device, budget=0.01, most=10)

        return seconds


def fill_random(stack: WeightStack) -> None:
    """Any codes with scales near those of real weights: only the time is of interest."""
    operand = stack.operand
    random_bits(operand.units_ENU, operand.format.values == "float")
    if operand.format.scales is torch.uint8:
        operand.scales_ERC.random_(115, 121)
    elif operand.format.scales is not None:
        operand.scales_ERC.uniform_(1e-3, 2e-3)
    if operand.format.zero_points:
        operand.zeros_ERC.random_(0, 16)


def random_bits(units: Tensor, is_float: bool) -> None:
    if is_float:
        units.normal_(std=units.shape[-1] ** -0.5)
    elif units.dtype is torch.int16:
        # Codes below 0x7c in both bytes: no NaN where they are eight-bit floats.
        units.view(torch.int8).random_(0, 0x7C)
    else:
        units.random_()


def products(options: argparse.Namespace) -> Iterator[tuple[Product, int]]:
    """What is to be tuned, with the picks of a token."""
    for name in options.formats:
        form = format_named(name, "--formats")
        if options.experts:
            yield Product(form, "gate_up", options.experts, options.intermediate, options.hidden), options.picks
            yield Product(form, "down", options.experts, options.hidden, options.intermediate), options.picks
        for rows, columns in options.linear:
            yield Product(form, "linear", 1, rows, columns), 1


def matrix(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("experts", "hidden", "intermediate", "picks"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--formats", nargs="+", default=["bfloat16"], help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--linear", nargs="*", type=matrix, default=[], help="ROWSxCOLUMNS of linear layers")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop measuring then; what was found is written")
    parser.add_argument("--out", type=Path, help="the table (default: the one that is read on this GPU)")
    options = parser.parse_args()
    layer = (options.experts, options.hidden, options.intermediate, options.picks)
    if (any(layer) and not all(layer)) or not (any(layer) or options.linear):
        parser.error("expected --experts, --hidden, --intermediate and --picks together, or --linear")
    if not torch.cuda.is_available():
        parser.error("there is no GPU here to measure on")
    device = torch.device("cuda")
    arch, deadline = architecture(device), time.monotonic() + 60 * options.minutes
    path = options.out or TABLES / f"{arch}.json"
    table, block_ms = dict(load_table(arch)), dict[str, int]()
    for product, picks in products(options):
        dtype = torch.bfloat16 if product.format.quantized else product.format.dtype
        # Both products of a layer share the sorted picks, and so BLOCK_M; gate_up comes first.
        settled = block_ms if product.role == "down" else None
        table[product.key] = tune(product, arch, Bench(product, picks, device, dtype).timer, deadline, settled)
        block_ms = {rows: tile.block_m for rows, tile in table[product.key].items()}
        save_table(path, table)
        print(product.key, *(f"{rows}: {tile}" for rows, tile in table[product.key].items()), sep="\n  ", flush=True)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
