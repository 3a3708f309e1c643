"""A started cluster: bring it up, watch it, bring it down. One loop, one thread, every wait bounded."""

import signal
import time
from collections.abc import Callable

from rich.console import Console

from moe_runtime.cluster.controller import Controller
from moe_runtime.cluster.display import LoadingDisplay
from moe_runtime.cluster.membership import Membership
from moe_runtime.cluster.stop_signals import StopSignals
from moe_runtime.cluster.supervisor import NodeExit, Supervisor
from moe_runtime.config import Config
from moe_runtime.protocol.control import Role

_TURN_MS = 100
# After a first death: its neighbours notice too, and the Fatal that explains it may still be on its way.
_SETTLE_S = 0.5
_STOP_ORDER: tuple[Role, ...] = ("gateway", "attention", "ffn")


class ClusterError(RuntimeError):
    """The cluster cannot go on; the message has the nodes' reasons and last log lines."""


class StopRequested(Exception):  # noqa: N818 - not an error: the user asked for it
    """A stop signal came while something else was awaited."""


class RunningCluster:
    """The launcher's loop over one controller and one supervisor."""

    def __init__(
        self,
        config: Config,
        membership: Membership,
        controller: Controller,
        supervisor: Supervisor,
        signals: StopSignals,
    ) -> None:
        self._config = config
        self.membership = membership
        self._controller = controller
        self._supervisor = supervisor
        self._signals = signals

    def start(self, console: Console) -> str:
        """Start every process and wait until all serve; returns the gateway's URL.

        Raises ClusterError when a process ends or startup_timeout_s passes, StopRequested on a signal.
        """
        for member in self.membership.members.values():
            self._supervisor.start(member.plan)
        with LoadingDisplay(console) as display:

            def loaded() -> bool:
                display.show(self.membership)
                return self.membership.ready

            self.watch(loaded, self._config.cluster.startup_timeout_s)
        assert self.membership.url is not None, "a gateway that serves has said its URL"
        return self.membership.url

    def watch(self, done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Serve until done(). Raises ClusterError when a process ends or time is up, StopRequested on a signal."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            if self._signals.requested:
                raise StopRequested
            if deadline is not None and time.monotonic() > deadline:
                raise ClusterError(self._late(timeout_s or 0.0))
            self._controller.step(self.membership, _TURN_MS)
            ended = self._supervisor.ended()
            if ended or self.membership.fatal:
                raise ClusterError(self._post_mortem(ended))

    def stop(self) -> list[str]:
        """Drain and end all processes: gateway first, so that its open requests still find the others.

        Within drain_timeout_s each is asked to finish; then SIGTERM, after close_timeout_s SIGKILL. A second signal
        from the user skips the waiting. Returns what did not go well, one line each.
        """
        deadline = time.monotonic() + self._config.cluster.drain_timeout_s
        faults: list[str] = []
        for role in _STOP_ORDER:
            self._controller.shut_down(self.membership, role)
            faults += self._await_end(deadline, role, patient=True)
        if late := self._supervisor.running():
            faults.append(f"{', '.join(late)} did not finish in time and had to be ended")
            self.terminate()
        return faults

    def terminate(self) -> None:
        """End all processes without draining: SIGTERM, after close_timeout_s SIGKILL."""
        self._supervisor.signal_all(signal.SIGTERM)
        self._await_end(time.monotonic() + self._config.exchange.close_timeout_s, None, patient=False)
        self._supervisor.kill_all()

    def _await_end(self, deadline: float, role: Role | None, patient: bool) -> list[str]:
        faults: list[str] = []
        while self._supervisor.running(role) and time.monotonic() < deadline:
            if patient and len(self._signals.received) > 1:
                break
            self._controller.step(self.membership, _TURN_MS // 2)
            faults += [f"{end.node} {end.reason} while stopping" for end in self._supervisor.ended() if end.code != 0]
        return faults

    def _late(self, timeout_s: float) -> str:
        late = self.membership.late()
        doing = ", ".join(f"{member.plan.name} ({member.what})" for member in late)
        head = f"not ready after {timeout_s:g} s (cluster.startup_timeout_s): {doing}"
        return "\n".join([head, *(self._log_lines(member.plan.name) for member in late)])

    def _post_mortem(self, ended: list[NodeExit]) -> str:
        """Why the cluster fell: each node that gave up or died, in that order, with its last log lines."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            self._controller.step(self.membership, _TURN_MS)
            ended = [*ended, *self._supervisor.ended()]
        reasons = {end.node: [f"{end.node} {end.reason}"] for end in ended}
        for fatal in self.membership.fatal:
            reasons.setdefault(fatal.node, []).append(f"{fatal.node}: {fatal.message}")
        return "\n".join("\n".join([*lines, self._log_lines(node)]) for node, lines in reasons.items())

    def _log_lines(self, node: str) -> str:
        tail = self._supervisor.log_tail(node)
        title = f"  last lines of {node}.log:" if tail else f"  {node}.log is empty"
        return "\n".join([title, *(f"  | {line}" for line in tail)])
