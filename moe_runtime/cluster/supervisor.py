"""Starts the node processes, notices when one ends, and leaves none behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from moe_runtime.cluster.process import child_environment
from moe_runtime.cluster.topology import NodePlan
from moe_runtime.protocol.control import Role

# The launcher knows the roles by their commands alone; it never imports them.
NODE_COMMANDS: Mapping[Role, tuple[str, ...]] = {
    "attention": (sys.executable, "-m", "attention_nodes"),
    "ffn": (sys.executable, "-m", "ffn_nodes"),
    "gateway": (sys.executable, "-m", "moe_runtime.gateway"),
}
_TAIL_LINES = 25
_KILL_WAIT_S = 5.0


@dataclass(frozen=True)
class NodeExit:
    """A process that has ended: exit code, or the negative signal number."""

    node: str
    code: int

    @property
    def reason(self) -> str:
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


class Supervisor:
    """The children of one launch, each in its own session, so that a terminal's Ctrl-C reaches the launcher alone."""

    def __init__(self, commands: Mapping[Role, tuple[str, ...]], endpoint: str, log_dir: Path) -> None:
        self._commands = commands
        self._endpoint = endpoint
        self._log_dir = log_dir
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._roles: dict[str, Role] = {}

    def start(self, node: NodePlan) -> None:
        """Start one process; its output goes to log_dir/NAME.log."""
        command = [*self._commands[node.role], "--node", node.name, "--controller", self._endpoint]
        with self.log_path(node.name).open("wb") as log:
            self._running[node.name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ, node.threads),
                start_new_session=True,
            )
        self._roles[node.name] = node.role

    def running(self, role: Role | None = None) -> list[str]:
        """Names of the processes not yet seen to have ended, of one role or of all."""
        return [name for name in self._running if role is None or self._roles[name] == role]

    def ended(self) -> list[NodeExit]:
        """Processes that have ended since the last call; whatever they had started themselves is killed."""
        exits = []
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[name]
                _signal_group(process.pid, signal.SIGKILL)
                exits.append(NodeExit(name, code))
        return exits

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every running process and to what it has started."""
        for process in self._running.values():
            _signal_group(process.pid, number)

    def kill_all(self) -> None:
        """SIGKILL to all that still run, and wait until they are gone."""
        self.signal_all(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_WAIT_S
        for process in self._running.values():
            # A process in an uninterruptible system call outlives even SIGKILL for a while.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.ended()

    def log_path(self, node: str) -> Path:
        return self._log_dir / f"{node}.log"

    def log_tail(self, node: str) -> list[str]:
        """The last lines that a process wrote."""
        path = self.log_path(node)
        if not path.is_file():
            return []
        with path.open(encoding="utf-8", errors="replace") as log:
            return [line.rstrip("\n") for line in deque(log, maxlen=_TAIL_LINES)]

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)
