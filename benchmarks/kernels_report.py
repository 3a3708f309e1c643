"""Compiles every Triton kernel for GPUs that are not at hand, at the sizes of four models, and says what came out.

    python benchmarks/kernels_report.py [--targets sm_90 ...] [--models Mixtral-8x7B ...] [--formats w8a16 ...]

Per kernel: registers, bytes that found no register, shared memory, the tensor-core instruction found in the code, and
bytes and operations per token with the least time they take on the nominal chip. Exits 1 where registers spill, shared
memory does not fit, or the expected instruction is missing. Writes build/bench/kernels_report.json; programs are kept
in build/triton, so that a second run takes seconds.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

os.environ.setdefault("TRITON_CACHE_DIR", os.path.abspath("build/triton"))

from moe_runtime.bench.report import Row, write_report
from moe_runtime.kernels.triton.catalogue import (
    CACHE_DTYPES,
    LINEAR_FORMATS,
    MODELS,
    Case,
    ModelShape,
    attention_cases,
    expected_instruction,
    expert_cases,
    linear_case,
    routing_cases,
)
from moe_runtime.kernels.triton.compile import TARGETS, compile_call
from moe_runtime.quant.formats import FORMATS, Format

TOKENS = {"decode": 16, "prefill": 4096}
CHUNK, CONTEXT = 1024, 4096


@dataclass(frozen=True)
class Chip:
    """Nominal figures: bytes a second of memory; operations a second of dense products by the type they are made in."""

    name: str
    bandwidth: float
    bf16: float
    int8: float
    float32: float


# Vendors' data sheets, without sparsity. Float32 is a third of TF32 on NVIDIA: three products make one.
CHIPS = {
    "sm_80": Chip("A100", 2.04e12, 312e12, 624e12, 52e12),
    "sm_90": Chip("H100", 3.35e12, 989e12, 1979e12, 165e12),
    "sm_100": Chip("B200", 8.0e12, 2250e12, 4500e12, 367e12),
    "gfx942": Chip("MI300X", 5.3e12, 1307e12, 2615e12, 163e12),
}


@dataclass(frozen=True)
class Work:
    """What a call must do at least: for all its tokens."""

    tokens: int
    bytes: float
    operations: float


@dataclass(frozen=True)
class Result:
    target: str
    model: str
    regime: str
    kernel: str
    format: str
    tile: str
    registers: int
    spilled: int
    shared: int
    instruction: str
    wrong: str
    work: Work | None
    seconds: float


def cases(target: str, shape: ModelShape, regime: str, formats: Sequence[str]) -> Iterator[tuple[Case, Work | None]]:
    """Kernels of a model on a target, with the least they must do."""
    tokens = TOKENS[regime]
    for name in formats:
        for case in expert_cases(shape, FORMATS[name], tokens, target):
            yield case, expert_work(case.kernel, shape, FORMATS[name], tokens)
        if name in LINEAR_FORMATS and shape.attention is not None:
            heads, kv_heads, dim, _ = shape.attention
            rows = (heads + 2 * kv_heads) * dim
            work = Work(tokens, FORMATS[name].nbytes(rows, shape.hidden), 2.0 * tokens * rows * shape.hidden)
            yield linear_case(rows, shape.hidden, FORMATS[name], tokens, target), work
    if formats:
        return
    yield from ((case, None) for case in routing_cases(shape, tokens))
    for cache in CACHE_DTYPES if shape.attention is not None else ():
        for case in attention_cases(shape, cache, target, CHUNK):
            if (case.kernel == "attention chunk") == (regime == "prefill"):
                yield case, attention_work(case.kernel, shape, CACHE_DTYPES[cache].itemsize)


def expert_work(kernel: str, shape: ModelShape, form: Format, tokens: int) -> Work | None:
    """Weights of the experts that uniformly routed tokens are expected to hit, rows in and out, and the products."""
    if kernel not in ("gate_up", "down"):
        return None
    hidden, inner, picks = shape.hidden, shape.intermediate, shape.picks
    hit = shape.experts * (1 - (1 - picks / shape.experts) ** tokens)
    rows, columns = (2 * inner, hidden) if kernel == "gate_up" else (hidden, inner)
    width = 2 if form.quantized else form.dtype.itemsize
    moved = tokens * (hidden + picks * inner) if kernel == "gate_up" else tokens * picks * (inner + hidden)
    return Work(tokens, hit * form.nbytes(rows, columns) + moved * width, 2.0 * tokens * picks * rows * columns)


def attention_work(kernel: str, shape: ModelShape, width: int) -> Work | None:
    """One row over CONTEXT cached tokens, or a chunk of CHUNK tokens with nothing before it."""
    if kernel == "attention join":
        return None
    assert shape.attention is not None
    heads, kv_heads, dim, window = shape.attention
    if kernel == "attention decode":
        seen = min(window or CONTEXT, CONTEXT)
        return Work(1, 2.0 * kv_heads * dim * seen * width, 4.0 * heads * dim * seen)
    seen = sum(min(window or CHUNK, at + 1) for at in range(CHUNK))
    return Work(CHUNK, 2.0 * kv_heads * dim * CHUNK * width, 4.0 * heads * dim * seen)


def compile_cases(job: tuple[str, str, str, list[str]]) -> list[Result]:
    """One process's share: a model's kernels on a target; without formats those that know none."""
    target, model, regime, formats = job
    return [compile_one(target, model, regime, *case) for case in cases(target, MODELS[model], regime, formats)]


def compile_one(target_name: str, model: str, regime: str, case: Case, work: Work | None) -> Result:
    target = TARGETS[target_name]
    build = compile_call(case.call, target)
    expected = expected_instruction(case, target)
    wrong = []
    if build.spilled:
        wrong.append("spills")
    if build.shared > target.shared:
        wrong.append("shared memory")
    if expected is not None and not build.uses(expected):
        wrong.append(f"no {expected}")
    tile = case.tile
    return Result(
        *(target_name, model, regime, case.kernel, case.format),
        "" if tile is None else f"{tile.block_m}x{tile.block_n}x{tile.block_k} w{tile.warps} s{tile.stages}",
        *(build.registers, build.spilled, build.shared),
        " ".join(sorted({short(name) for name in build.instructions})),
        ", ".join(wrong),
        *(work, build.seconds),
    )


def short(instruction: str) -> str:
    """mma_async.sync.aligned and the like left out."""
    return ".".join(
        part for part in instruction.split(".") if part not in ("mma_async", "sync", "aligned", "row", "col")
    )


def least_time(result: Result) -> tuple[float, str] | None:
    """(seconds, what takes them) on the nominal chip."""
    if result.work is None:
        return None
    chip = CHIPS[result.target]
    peak = {"w8a8": chip.int8, "float32": chip.float32}.get(result.format, chip.bf16)
    memory, products = result.work.bytes / chip.bandwidth, result.work.operations / peak
    return (memory, "memory") if memory >= products else (products, "products")


def line(result: Result) -> str:
    work, least = result.work, least_time(result)
    cells = [result.target, result.model, result.regime, result.kernel, result.format, result.tile]
    cells += [str(result.registers), str(result.spilled), f"{result.shared / 1024:.0f}", result.instruction]
    cells += ["", "", ""] if work is None or least is None else [
        f"{work.bytes / work.tokens / 1e6:.3g}", f"{work.operations / work.tokens / 1e6:.3g}",
        f"{least[0] * 1e6:.3g} ({least[1]})",
    ]  # fmt: skip
    return f"| {' | '.join([*cells, result.wrong or 'ok'])} |"


HEAD = (
    "| target | model | regime | kernel | format | tile | registers | spilled, B | shared, KiB | products by |"
    " MB a token | MFLOP a token | least time, us | |"
)


def rows(results: Iterable[Result]) -> Iterator[Row]:
    for result in results:
        case = " ".join((result.target, result.model, result.regime, result.kernel, result.format))
        yield Row(case, "registers", result.registers, "")
        yield Row(case, "spilled", result.spilled, "B")
        yield Row(case, "shared memory", result.shared, "B", "limit", result.shared / TARGETS[result.target].shared)
        yield Row(case, f"expected code ({result.instruction})", float(not result.wrong), "")
        least = least_time(result)
        if result.work is not None and least is not None:
            yield Row(case, "memory a token", result.work.bytes / result.work.tokens, "B")
            yield Row(case, "operations a token", result.work.operations / result.work.tokens, "FLOP")
            yield Row(case, f"least time on {CHIPS[result.target].name}", least[0] * 1e6, "us", least[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    begin = time.perf_counter()
    results: list[Result] = []
    parts = [[name] for name in options.formats] + [[]]
    jobs = [
        (target, model, regime, part)
        for target in options.targets
        for model in options.models
        for regime in TOKENS
        for part in parts
    ]
    chips = ", ".join(f"{name}: {CHIPS[name].name}" for name in options.targets)
    print(f"Nominal chips: {chips}. DeepSeek-V3 has latent attention, which no kernel here computes.")
    print(f"{HEAD}\n|{'---|' * (HEAD.count('|') - 1)}")
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for share in pool.map(compile_cases, jobs):
            results += share
            print("\n".join(map(line, share)), flush=True)
    path = write_report("kernels_report", list(rows(results)), "make kernels-report")
    wrong = [result for result in results if result.wrong]
    print(f"\n{len(results)} kernels in {time.perf_counter() - begin:.0f} s, {len(wrong)} not as expected; {path}")
    for result in wrong:
        print(line(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
