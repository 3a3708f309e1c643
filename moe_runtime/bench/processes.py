"""A cluster's processes as the operating system sees them: who they are, and what they use (Linux's /proc)."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.cluster.process import PARENT_PID

_LISTENING = "0A"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class NodeProcess:
    """One process of a launch. Every property reads its present value; FileNotFoundError once it is gone."""

    name: str
    pid: int

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time since its start, all threads together."""
        # The command's name may hold blanks; what follows its bracket does not.
        fields = (self._proc / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    @property
    def threads(self) -> int:
        return len(list((self._proc / "task").iterdir()))

    @property
    def open_files(self) -> int:
        """File descriptors: sockets, files, pipes."""
        return len(list((self._proc / "fd").iterdir()))

    @property
    def resident_bytes(self) -> int:
        return int((self._proc / "statm").read_text(encoding="utf-8").split()[1]) * _PAGE_BYTES

    @property
    def listening_ports(self) -> tuple[int, ...]:
        """TCP ports (IPv4) that it accepts connections on."""
        inodes = set(self._socket_inodes())
        rows = [line.split() for line in (self._proc / "net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
        return tuple(int(row[1].partition(":")[2], 16) for row in rows if row[3] == _LISTENING and row[9] in inodes)

    def _socket_inodes(self) -> Iterator[str]:
        for entry in (self._proc / "fd").iterdir():
            try:
                target = os.readlink(entry)
            except FileNotFoundError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                yield target[8:-1]

    @property
    def _proc(self) -> Path:
        return Path("/proc") / str(self.pid)


def nodes_of(launcher: int) -> dict[str, NodeProcess]:
    """The living processes that the launcher with this process id has started, by node name."""
    mark = f"{PARENT_PID}={launcher}".encode()
    nodes = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # somebody else's, or gone
        if mark in environment and "--node" in command:
            name = command[command.index("--node") + 1]
            nodes[name] = NodeProcess(name, int(entry.name))
    return nodes
