"""How far a long piece of work has come: a bar on stderr, where that is a terminal."""

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Stopped(Exception):  # noqa: N818 (no error: it was asked for)
    """Somebody asked for the work to stop."""


class ProgressBar:
    """Entered, it may be called as often as one likes with the fraction done; it raises Stopped once `stop` is true."""

    def __init__(self, title: str, stop: Callable[[], bool]) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(title), BarColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._terminal, self._stop = console.is_terminal, stop
        self._task: TaskID | None = None

    def __call__(self, fraction: float, what: str) -> None:
        if self._stop():
            raise Stopped
        if self._task is not None:
            self._bar.update(self._task, completed=fraction, description=what)

    def __enter__(self) -> "ProgressBar":
        if self._terminal:
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            self._bar.stop()
