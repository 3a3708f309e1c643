"""One run on a GPU machine: is every Triton kernel right there, and how near does it come to what the machine can do?

    python scripts/gpu_check.py [--minutes 5] [--model Qwen3-235B] [--formats w8a16 ...] [--out FILE]

1. Correctness: every kernel and format on fresh random data against float64, and each row the same bits whatever is
   beside it. Several processes share this, since most of it is compiling.
2. Ceilings: what a large copy and large products reach.
3. Times: the experts of one layer and paged attention as CUDA graphs, caches flushed, the median of many, for decode
   (1 to 128 tokens) and prefill (4096), as shares of these ceilings.

Tables are Markdown and printed as they come; the JSON is written after each part. Exits 1 when a result is wrong, 2
when time ran out before all was checked. Without a GPU the first part runs at tiny sizes under Triton's interpreter.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton

from moe_runtime.kernels.attention_plan import SequenceSlice
from moe_runtime.kernels.bank import BankShape
from moe_runtime.kernels.triton import measure, selfcheck
from moe_runtime.kernels.triton.bank import TritonBank
from moe_runtime.kernels.triton.catalogue import CACHE_DTYPES, LINEAR_FORMATS, MODELS, ModelShape
from moe_runtime.kernels.triton.launch import architecture
from moe_runtime.kernels.triton.paged import Cache, PagedPlan, paged_attention, plan_paged
from moe_runtime.kernels.triton.tune import fill_random
from moe_runtime.quant.formats import FORMATS, Format

DECODE, PREFILL, CONTEXT = (1, 4, 16, 64, 128), 4096, 4096
BLOCK = 16


@dataclass(frozen=True)
class Check:
    """error: of the norm, against float64; limit: what it may be. failure: what went wrong otherwise."""

    kernel: str
    format: str
    dtype: str
    error: float
    limit: float
    failure: str = ""

    @property
    def right(self) -> bool:
        return not self.failure and self.error <= self.limit


@dataclass(frozen=True)
class Time:
    """share: of the ceiling named, which is the nearer one."""

    kernel: str
    format: str
    tokens: int
    microseconds: float
    gigabytes_a_second: float
    teraflops: float
    share: float
    ceiling: str


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_jobs(formats: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(kernel, format, dtype of activations)."""
    yield "sort", "", ""
    for name in formats:
        form = FORMATS[name]
        for dtype in ("bfloat16", "float16") if form.quantized else (name_of(form.dtype),):
            yield "experts", name, dtype
        if name in LINEAR_FORMATS:
            yield "linear", name, "bfloat16"
    for cache, dtype in CACHE_DTYPES.items():
        activations = "bfloat16" if dtype.itemsize == 1 else cache
        yield "attention", cache, activations
        yield "attention, window", cache, activations


def check(job: tuple[str, str, str]) -> Check:
    """Runs in a process of its own."""
    kernel, name, activations = job
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(time.time_ns() % 2**31)
    dtype = getattr(torch, activations) if activations else torch.float32
    try:
        if kernel == "sort":
            return Check(*job, selfcheck.check_sort(device), 0.0)
        if kernel.startswith("attention"):
            window = 37 if kernel.endswith("window") else None
            error = selfcheck.check_attention(CACHE_DTYPES[name], dtype, window, device)
            return Check(*job, error, selfcheck.LIMITS[dtype])
        run = selfcheck.check_experts if kernel == "experts" else selfcheck.check_linear
        return Check(*job, run(FORMATS[name], dtype, device), selfcheck.limit(FORMATS[name], dtype))
    except Exception as error:  # noqa: BLE001 - whatever a kernel does there is the result of its check
        return Check(*job, float("inf"), 0.0, f"{type(error).__name__}: {str(error)[:300]}")


def prime(job: tuple[str, str]) -> None:
    """Compile what will be timed, so that the programs lie in Triton's cache."""
    model, name = job
    device = torch.device("cuda")
    bank = random_bank(MODELS[model], FORMATS[name], device)
    for tokens in (*DECODE, PREFILL):
        bank(*random_tokens(MODELS[model], FORMATS[name], tokens, device))
    torch.cuda.synchronize()


def random_bank(shape: ModelShape, form: Format, device: torch.device) -> TritonBank:
    bank = TritonBank(BankShape(shape.experts, shape.hidden, shape.intermediate, form), device)
    for stack in bank.stacks:
        fill_random(stack)
    return bank


def random_tokens(
    shape: ModelShape, form: Format, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_TH = torch.randn(tokens, shape.hidden, device=device).to(torch.bfloat16 if form.quantized else form.dtype)
    slots_TK = torch.rand(tokens, shape.experts, device=device).topk(shape.picks).indices
    return x_TH, slots_TK, torch.rand(tokens, shape.picks, device=device)


def time_experts(model: str, form: Format, device: torch.device) -> Iterator[Time]:
    """The whole layer: sort, both products, sum."""
    shape = MODELS[model]
    bank = random_bank(shape, form, device)
    for tokens in (*DECODE, PREFILL):
        inputs = random_tokens(shape, form, tokens, device)
        replay = measure.graph_of(lambda inputs=inputs: bank(*inputs))  # type: ignore[misc]
        seconds = measure.median_seconds(replay, device)
        experts = int(inputs[1].unique().numel())
        weights = 3 * shape.hidden * shape.intermediate
        moved = experts * bank.nbytes / shape.experts
        operations = 2.0 * tokens * shape.picks * weights
        yield timed(f"experts of {model}", form.name, tokens, seconds, moved, operations, product_dtype(form), device)


def product_dtype(form: Format) -> torch.dtype:
    if form.activations == "int8":
        return torch.int8
    return torch.bfloat16 if form.quantized else form.dtype


def timed(
    kernel: str, form: str, tokens: int, seconds: float, moved: float, operations: float, dtype: torch.dtype,
    device: torch.device,
) -> Time:  # fmt: skip
    by_memory = moved / measure.copy_bandwidth(device)
    by_products = operations / measure.product_rate(device, dtype)
    ceiling = "copy" if by_memory >= by_products else f"{name_of(dtype)} product"
    share = max(by_memory, by_products) / seconds
    return Time(kernel, form, tokens, seconds * 1e6, moved / seconds / 1e9, operations / seconds / 1e12, share, ceiling)


def time_attention(model: str, cache: str, device: torch.device) -> Iterator[Time]:
    """Decode over CONTEXT cached tokens a row; a prompt of PREFILL tokens in one chunk."""
    shape = MODELS[model]
    if shape.attention is None:
        return
    heads, kv_heads, dim, window = shape.attention
    dtype = CACHE_DTYPES[cache]
    q_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    for rows in (*DECODE, None):
        blocks = (rows or 1) * CONTEXT // BLOCK
        held = random_cache(dtype, (kv_heads, blocks, BLOCK, dim), device)
        tables = torch.randperm(blocks).view(rows or 1, -1).tolist()
        pieces = [(CONTEXT - 1, 1)] * rows if rows else [(0, PREFILL)]
        plan = plan_paged(
            [SequenceSlice(*piece, table) for piece, table in zip(pieces, tables, strict=True)], BLOCK, device
        )
        q_TAD = torch.randn(rows or PREFILL, heads, dim, device=device).to(q_dtype)
        seconds = measure.median_seconds(measure.graph_of(attention(q_TAD, held, plan, window)), device)
        yield attention_time(model, cache, rows, seconds, device)


def attention(q_TAD: torch.Tensor, held: Cache, plan: PagedPlan, window: int | None):  # type: ignore[no-untyped-def]
    return lambda: paged_attention(q_TAD, held, plan, window, q_TAD.shape[-1] ** -0.5)


def attention_time(model: str, cache: str, rows: int | None, seconds: float, device: torch.device) -> Time:
    described = MODELS[model].attention
    assert described is not None
    heads, kv_heads, dim, window = described
    width = CACHE_DTYPES[cache].itemsize
    dtype = torch.bfloat16 if width == 1 else CACHE_DTYPES[cache]
    if rows is None:
        seen, cached = sum(min(window or PREFILL, at + 1) for at in range(PREFILL)), PREFILL
    else:
        seen = cached = rows * min(window or CONTEXT, CONTEXT)
    moved, operations = 2.0 * kv_heads * dim * cached * width, 4.0 * heads * dim * seen
    kernel = f"{'decode' if rows else 'prefill'} attention of {model}"
    return timed(kernel, cache, rows or PREFILL, seconds, moved, operations, dtype, device)


def random_cache(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Cache:
    if dtype.itemsize > 1:
        return Cache(*torch.randn(2, *shape, device=device, dtype=torch.bfloat16).to(dtype))
    codes = torch.randint(-0x7B, 0x7C, (2, *shape), dtype=torch.int8, device=device)
    if dtype is not torch.int8:
        codes = codes.abs_()
    scale_G = torch.full((shape[0],), 0.01, device=device)
    return Cache(codes[0].view(dtype), codes[1].view(dtype), scale_G, scale_G)


class Report:
    """What is known so far, on the screen and in the file."""

    def __init__(self, path: Path, header: dict[str, object]) -> None:
        self._path, self._header = path, header
        self.checks: list[Check] = []
        self.times: list[Time] = []
        self.ceilings: dict[str, float] = {}

    def save(self) -> None:
        parts = {"checks": [asdict(one) for one in self.checks], "times": [asdict(one) for one in self.times]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({**self._header, "ceilings": self.ceilings, **parts}, indent=1)
        self._path.write_text(content + "\n", encoding="utf-8")

    def check(self, found: Check) -> None:
        self.checks.append(found)
        verdict = "ok" if found.right else f"WRONG {found.failure}"
        print(
            f"| {found.kernel} | {found.format} | {found.dtype} | {found.error:.1e} | {found.limit:.1e} | {verdict} |",
            flush=True,
        )

    def time(self, found: Time) -> None:
        self.times.append(found)
        print(
            f"| {found.kernel} | {found.format} | {found.tokens} | {found.microseconds:.1f} | "
            f"{found.gigabytes_a_second:.0f} | {found.teraflops:.1f} | {found.share:.0%} of {found.ceiling} |",
            flush=True,
        )


def run_checks(report: Report, options: argparse.Namespace, deadline: float) -> bool:
    """False where time ran out."""
    gpu = torch.cuda.is_available()
    print("\n| kernel | format | activations | error | limit | |\n|---|---|---|---|---|---|", flush=True)
    jobs = list(check_jobs(options.formats))
    if not gpu:
        for job in jobs:
            report.check(check(job))
        return True
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(check, job) for job in jobs]
        primed = [pool.submit(prime, (options.model, name)) for name in options.formats]
        try:
            for done in as_completed(waiting, timeout=max(1.0, deadline - time.monotonic())):
                report.check(done.result())
            for done in as_completed(primed, timeout=max(1.0, deadline - time.monotonic())):
                done.result()
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
            return len(report.checks) == len(jobs)
    return True


def run_times(report: Report, options: argparse.Namespace, deadline: float) -> None:
    device = torch.device("cuda")
    report.ceilings["copy, GB/s"] = measure.copy_bandwidth(device) / 1e9
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8):
        report.ceilings[f"{name_of(dtype)} product, TFLOP/s"] = measure.product_rate(device, dtype) / 1e12
    print("\n" + "; ".join(f"{name}: {value:.0f}" for name, value in report.ceilings.items()))
    print("\n| kernel | format | tokens | us | GB/s | TFLOP/s | share |\n|---|---|---|---|---|---|---|", flush=True)
    for name in options.formats:
        for one in time_experts(options.model, FORMATS[name], device):
            report.time(one)
        report.save()
        if time.monotonic() > deadline:
            return
    for cache in CACHE_DTYPES:
        for one in time_attention(options.model, cache, device):
            report.time(one)
        report.save()
        if time.monotonic() > deadline:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="for everything; what comes later is left out")
    parser.add_argument("--model", choices=MODELS, default="Qwen3-235B", help="whose sizes are timed")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("build/bench/gpu_check.json"))
    options = parser.parse_args()
    begin = time.monotonic()
    deadline, gpu = begin + 60 * options.minutes, torch.cuda.is_available()
    header: dict[str, object] = {
        "device": torch.cuda.get_device_name() if gpu else "interpreter",
        "architecture": architecture(torch.device("cuda")),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }
    print(", ".join(f"{key}: {value}" for key, value in header.items()), flush=True)
    report = Report(options.out, header)
    # Most of the time is for the times, of which a few are better than none.
    complete = run_checks(report, options, begin + 60 * options.minutes * 0.6)
    report.save()
    if gpu:
        run_times(report, options, deadline)
    wrong = [found for found in report.checks if not found.right]
    print(f"\n{len(report.checks)} checks, {len(wrong)} wrong, {time.monotonic() - begin:.0f} s; {options.out}")
    for found in wrong:
        print(f"WRONG: {found}")
    return 1 if wrong else 0 if complete else 2


if __name__ == "__main__":
    sys.exit(main())
