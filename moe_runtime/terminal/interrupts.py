"""Ctrl-C as the end of one piece of work instead of the program's."""

import asyncio
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any


class Interrupts:
    """While entered, SIGINT stops what run() runs, by cancelling it, and does nothing else."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None

    def __enter__(self) -> "Interrupts":
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work came to its end; False: Ctrl-C stopped it. Raises what the work raises."""
        self._work = task = asyncio.create_task(work)
        try:
            await asyncio.wait([task])
        finally:
            self._work = None
        if task.cancelled():
            return False
        task.result()
        return True

    def _stop(self) -> None:
        """Cancel once: a second Ctrl-C must not tear what the first one is closing."""
        if self._work is not None:
            self._work.cancel()
            self._work = None
