"""Threads that share the experts of one call, for machines where one small product cannot keep several cores busy.

A product of a few rows takes tens of microseconds, and splitting each over cores costs a good part of that in
starting and joining; whole experts side by side join once a layer. torch releases the interpreter's lock inside each
product.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch


class Workers:
    """`threads` counts the caller. Idle workers sleep."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}: expected at least 1")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "experts", _one_thread) if threads > 1 else None

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run at most `threads` tasks at once, the first one here, each on one core; raises what a task raised."""
        assert len(tasks) <= self.threads
        if self._pool is None or len(tasks) < 2:
            for task in tasks:
                task()
            return
        inference, before = torch.is_inference_mode_enabled(), torch.get_num_threads()
        others = [self._pool.submit(_run, task, inference) for task in tasks[1:]]
        # The caller's own products must not ask for the cores that the others run on.
        torch.set_num_threads(1)
        try:
            tasks[0]()
        finally:
            wait(others)
            torch.set_num_threads(before)
        for other in others:
            other.result()


def _one_thread() -> None:
    torch.set_num_threads(1)


def _run(task: Callable[[], None], inference: bool) -> None:
    with torch.inference_mode(inference):
        task()
