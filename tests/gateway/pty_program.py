"""`moe-runtime` on a terminal of its own: a real pty, driven by keys and read by what it shows."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

COMMAND = [sys.executable, "-c", "from moe_runtime.cli import main; main()"]
WAIT_S = 30.0
CTRL_C, CTRL_D, CTRL_P, ENTER, ALT_ENTER = b"\x03", b"\x04", b"\x10", b"\r", b"\x1b\r"


class PtyProgram:
    """One run of the program; leaving kills it if it still runs. `seen` is all that it has written."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.seen = b""
        self._read_to = 0

    def expect(self, text: str) -> str:
        """What was shown since the last expected text, up to the end of this one, without the terminal's orders."""
        deadline = time.monotonic() + WAIT_S
        pattern = re.compile(re.escape(text.encode()))
        while (match := pattern.search(self.seen, self._read_to)) is None:
            assert time.monotonic() < deadline, f"waited for {text!r}; saw {self.seen[self._read_to :]!r}"
            self._read(0.1)
        shown = self.seen[self._read_to : match.end()]
        self._read_to = match.end()
        return plain(shown)

    def send(self, keys: str | bytes) -> None:
        os.write(self._master, keys.encode() if isinstance(keys, str) else keys)

    def ready(self) -> None:
        """Wait until it reads keys itself. After a line was sent, expect what it causes before this."""
        deadline = time.monotonic() + WAIT_S
        while termios.tcgetattr(self._master)[3] & termios.ICANON:
            assert time.monotonic() < deadline, f"no prompt; saw {self.seen[self._read_to :]!r}"
            self._read(0.02)

    def say(self, line: str) -> None:
        """Type this line as soon as lines are read."""
        self.ready()
        self.send(line.encode() + ENTER)

    def wait(self) -> int:
        """The exit code, once it has ended; everything it wrote is read."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running; saw {self.seen[self._read_to :]!r}"
            self._read(0.05)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.seen += data
        return bool(data)

    def __enter__(self) -> "PtyProgram":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._master)


def plain(shown: bytes) -> str:
    """The text without escape sequences and carriage returns."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace")).replace("\r", "")
