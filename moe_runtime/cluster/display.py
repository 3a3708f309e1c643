"""How far the nodes have come, on stderr: bars in a terminal, one line a change elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moe_runtime.cluster.membership import Membership


def say(console: Console, line: str) -> None:
    """Print text as it is: no colours, no wrapping, no markup."""
    console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


class LoadingDisplay:
    """Shows a Membership while it is loading; show() is cheap enough for every turn of the launcher's loop."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}
        self._bars: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.fields[node]:9}"), BarColumn(), TextColumn("{task.description}"))
            self._bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)

    def show(self, membership: Membership) -> None:
        """Bring the display up to date."""
        for name, member in membership.members.items():
            if self._bars:
                self._move_bar(name, member.fraction, member.what)
            elif self._said.get(name) != member.what:
                say(self._console, f"{name}: {member.what}")
            self._said[name] = member.what

    def _move_bar(self, name: str, fraction: float, what: str) -> None:
        assert self._bars is not None
        names = list(self._said)
        if name not in names:
            self._bars.add_task(what, total=1.0, node=name)
            names.append(name)
        task = self._bars.tasks[names.index(name)]
        self._bars.update(task.id, completed=fraction, description=what)

    def __enter__(self) -> "LoadingDisplay":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()
