"""Times on the GPU at hand, and its ceilings: what copies and matrix products really reach there.

Legend: T tokens, H hidden, I intermediate.
"""

import functools
import statistics
from collections.abc import Callable

import torch

# Longer than any cache, so that each measured call finds its operands in memory.
_FLUSH_BYTES = 256 * 2**20
_COPY_BYTES, _MATRIX = 2**30, 8192


def median_seconds(call: Callable[[], object], device: torch.device, budget: float = 0.1, most: int = 50) -> float:
    """Median of many calls, each after the caches were flushed; about `budget` seconds of them, five at least."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    call()
    first = _timed(call, flush)
    times = [_timed(call, flush) for _ in range(min(most, max(5, int(budget / max(first, 1e-6)))))]
    return statistics.median(times)


def _timed(call: Callable[[], object], flush: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    """The same launches as one CUDA graph: what a step costs without the time to start each kernel from Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@functools.cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written both counted."""
    source = torch.randint(-100, 100, (_COPY_BYTES,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / median_seconds(lambda: target.copy_(source), device)


@functools.cache
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large square product of random numbers, by torch's library."""
    if dtype is torch.int8:
        a, b = torch.randint(-127, 127, (2, _MATRIX, _MATRIX), dtype=dtype, device=device)
        return 2 * _MATRIX**3 / median_seconds(lambda: torch._int_mm(a, b.t()), device)
    a, b = torch.randn(2, _MATRIX, _MATRIX, device=device).to(dtype)
    return 2 * _MATRIX**3 / median_seconds(lambda: a @ b.t(), device)
