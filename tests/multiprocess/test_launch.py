"""The launcher against nodes that behave, die, hang and refuse to leave; afterwards no process and no file is left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT_S = 60.0
NODES = {"f0", "f1", "a0", "gateway0"}


class Launch:
    """One launcher process in its own temporary directory."""

    def __init__(self, tmp_path: Path, behaviours: dict[str, str], options: dict[str, str], *overrides: str) -> None:
        self.pid_dir = tmp_path / "pids"
        self.run_root = tmp_path / "tmp"
        self.pid_dir.mkdir()
        self.run_root.mkdir()
        fakes = {f"FAKE_{node}": behaviour for node, behaviour in behaviours.items()}
        program = str(Path(__file__).with_name("fake_launch.py"))
        settings = ["gateway.port=0", "exchange.close_timeout_s=1", *overrides]
        self.process = subprocess.Popen(
            [sys.executable, program, json.dumps(options), *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **fakes, "FAKE_PIDS": str(self.pid_dir), "TMPDIR": str(self.run_root)},
            start_new_session=True,
        )

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert re.fullmatch(r"ready: http://127\.0\.0\.1:\d+\n", line), line
        return line

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def assert_nothing_left(self) -> None:
        assert self.living() == []
        assert list(self.run_root.iterdir()) == []

    def living(self) -> list[str]:
        return [path.name for path in self.pid_dir.iterdir() if is_alive(path.read_text())]


def is_alive(pid: str) -> bool:
    """False for zombies too: whoever inherited them may be slow to bury them."""
    try:
        return bool(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


Launcher = Callable[..., Launch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Launcher]:
    launches: list[Launch] = []

    def start_one(behaviours: dict[str, str] | None = None, *overrides: str, **options: str) -> Launch:
        launches.append(Launch(tmp_path, behaviours or {}, options, *overrides))
        return launches[-1]

    yield start_one
    for launch in launches:
        launch.process.kill()
        launch.process.communicate()
        for node in launch.living():
            os.kill(int((launch.pid_dir / node).read_text()), signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_leaves_nothing(start: Launcher, tmp_path: Path, number: signal.Signals) -> None:
    logs = tmp_path / "logs"
    launch = start(log_dir=str(logs))
    launch.wait_ready()
    assert set(launch.living()) == NODES
    launch.process.send_signal(number)
    code, _, err = launch.finish()
    assert code == 0, err
    launch.assert_nothing_left()
    drained = {node: float((logs / f"{node}.log").read_text().split()[1]) for node in NODES}
    assert sorted(drained, key=drained.__getitem__)[:2] == ["gateway0", "a0"], "FFN nodes must leave last"


def test_plan_and_progress_are_told(start: Launcher) -> None:
    launch = start({"f1": "has_child"})
    launch.wait_ready()
    wait_until(lambda: set(launch.living()) == {*NODES, "grandchild"})
    launch.process.terminate()
    _, _, err = launch.finish()
    assert "model: paper (mixtral, 1 layers, 4 experts, top-2)" in err
    assert re.search(
        r"plan: 1 attention x \d+ threads?, 2 ffn x \d+ threads?( on core [\d+, ]+)?, 1 gateway on \d+ cores?", err
    )
    assert "a0: ready" in err
    launch.assert_nothing_left()


def test_ask_prints_the_answer_and_stops(start: Launcher) -> None:
    launch = start(ask="hello there")
    code, out, err = launch.finish()
    assert code == 0, err
    assert out.splitlines()[1:] == ["fake says hello there"]
    launch.assert_nothing_left()


def test_a_broken_answer_is_an_error(start: Launcher) -> None:
    code, _, err = start(ask="break").finish()
    assert code == 1
    assert "error: the answer broke off: no more tokens" in err


def test_greet_answers_and_serves_on(start: Launcher) -> None:
    launch = start(greet="hello")
    url = launch.wait_ready().split()[1]
    assert launch.process.stdout is not None
    lines = [launch.process.stdout.readline() for _ in range(12)]
    assert lines[0] == "fake says hello\n"
    assert any(line.startswith(f"curl {url}/v1/chat/completions") for line in lines)
    assert any(f'base_url="{url}/v1"' in line for line in lines)
    assert set(launch.living()) == NODES
    launch.process.terminate()
    assert launch.finish()[0] == 0


@pytest.mark.parametrize(
    ("behaviours", "expected"),
    [
        ({"f1": "die_at_start"}, ["f1 ended with exit code 3", "| line 99"]),
        ({"a0": "fatal"}, ["a0: the weights do not fit"]),
        (
            {"f0": "never_ready"},
            ["not ready after 3 s (cluster.startup_timeout_s): f0 (stuck at layer 7), a0 (loading"],
        ),
    ],
)
def test_a_node_that_fails_at_start_ends_the_launch(
    start: Launcher, behaviours: dict[str, str], expected: list[str]
) -> None:
    launch = start(behaviours, "cluster.startup_timeout_s=3" if "f0" in behaviours else "cluster.heartbeat_s=0.1")
    code, out, err = launch.finish()
    assert code == 1
    assert "ready" not in out
    for text in expected:
        assert text in err
    launch.assert_nothing_left()


def test_a_node_that_dies_later_ends_the_launch(start: Launcher) -> None:
    launch = start({"a0": "die_later"})
    code, _, err = launch.finish()
    assert code == 1
    assert "a0 ended with exit code 4" in err
    assert "| a line before dying" in err
    launch.assert_nothing_left()


def test_a_node_killed_from_outside_is_named(start: Launcher) -> None:
    launch = start()
    launch.wait_ready()
    os.kill(int((launch.pid_dir / "f1").read_text()), signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 1
    assert "f1 was ended by SIGKILL" in err
    launch.assert_nothing_left()


def test_a_node_that_will_not_leave_is_killed(start: Launcher) -> None:
    launch = start({"a0": "stubborn"}, "cluster.drain_timeout_s=1")
    launch.wait_ready()
    launch.process.terminate()
    code, _, err = launch.finish()
    assert code == 1
    assert "did not finish in time and had to be ended" in err
    launch.assert_nothing_left()


def test_a_second_signal_does_not_wait_for_the_drain(start: Launcher) -> None:
    launch = start({"a0": "stubborn"}, "cluster.drain_timeout_s=3000")
    launch.wait_ready()
    launch.process.terminate()
    wait_until(lambda: "gateway0" not in launch.living())
    launch.process.terminate()
    assert launch.finish()[0] == 1
    launch.assert_nothing_left()


def test_a_signal_while_loading_stops_at_once(start: Launcher) -> None:
    launch = start({"f0": "never_ready"})
    wait_until(lambda: set(launch.living()) == NODES)
    launch.process.terminate()
    code, out, _ = launch.finish()
    assert code == 128 + signal.SIGTERM
    assert out == ""
    launch.assert_nothing_left()


def test_a_launcher_killed_outright_orphans_nobody(start: Launcher) -> None:
    launch = start({"a0": "stubborn"})
    launch.wait_ready()
    launch.process.kill()
    wait_until(lambda: launch.living() == [])


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_runtime", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def test_a_taken_port_is_refused_before_anything_loads(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{path: {tmp_path / 'nowhere'}}}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_cli("launch", str(config), "--port", str(port))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "--port 0" in result.stderr


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{path: {tmp_path / 'nowhere'}}}\n")
    result = run_cli("launch", str(config), "--port", "0")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "nowhere" in result.stderr
