"""A cluster as a benchmark's peer: `moe-runtime launch` in a process of its own, up when it prints its ready line."""

import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_READY = re.compile(rb"^ready: (http://\S+)", re.MULTILINE)


@dataclass(frozen=True)
class RunningServer:
    """Where a cluster answers, and its launcher's process id."""

    url: str
    pid: int


@contextmanager
def running_server(config: Path, overrides: Sequence[str] = (), startup_s: float = 600.0) -> Iterator[RunningServer]:
    """Yield a cluster that is stopped afterwards; RuntimeError with its output if it never starts or ends by itself."""
    command = [sys.executable, "-m", "moe_runtime", "launch", str(config), "--port", "0"]
    for override in overrides:
        command += ["--set", override]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield RunningServer(_wait_ready(process, startup_s), process.pid)
        if process.poll() is not None:
            raise RuntimeError(f"the server ended by itself:\n{_rest_of_output(process)}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _rest_of_output(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.read().decode(errors="replace")


def _wait_ready(process: "subprocess.Popen[bytes]", startup_s: float) -> str:
    assert process.stdout is not None
    output, deadline = b"", time.monotonic() + startup_s
    while time.monotonic() < deadline:
        if not select.select([process.stdout], [], [], 1.0)[0]:
            continue
        chunk = process.stdout.read1(65536)  # type: ignore[attr-defined]
        output += chunk
        if ready := _READY.search(output):
            return ready.group(1).decode()
        if not chunk:
            break
    raise RuntimeError(f"the server did not start:\n{output.decode(errors='replace')}")
