"""How far the nodes have come, on stderr: bars in a terminal, one line a change elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from moe_runtime.cluster.membership import Member, Membership, Stage


def say(console: Console, line: str) -> None:
    """Print text as it is: no colours, no wrapping, no markup."""
    console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


class LoadingDisplay:
    """Shows a Membership while it is loading; show() is cheap enough for every turn of the launcher's loop."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._milestones: dict[str, tuple[Stage, int]] = {}
        self._bars: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.fields[node]:9}"), BarColumn(), TextColumn("{task.description}"))
            self._bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)

    def show(self, membership: Membership) -> None:
        """Bring the display up to date."""
        for member in membership.members.values():
            if self._bars:
                self._move_bar(self._bars, member)
            else:
                self._tell_milestone(member)

    def _move_bar(self, bars: Progress, member: Member) -> None:
        name = member.plan.name
        if name not in self._tasks:
            self._tasks[name] = bars.add_task(member.what, total=1.0, node=name)
        bars.update(self._tasks[name], completed=member.fraction, description=member.what)

    def _tell_milestone(self, member: Member) -> None:
        """A line for each stage and each quarter of loading."""
        name, milestone = member.plan.name, (member.stage, int(member.fraction * 4))
        if self._milestones.get(name) != milestone:
            self._milestones[name] = milestone
            say(self._console, f"{name}: {member.what} ({member.fraction:.0%})")

    def __enter__(self) -> "LoadingDisplay":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()
