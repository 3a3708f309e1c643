"""The gateway's life as a process: start-up, draining, bad starts, lost neighbours, and no orphans."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from fake_controller import FakeController, make_config, make_spec, wait_until
from fake_engine import Answer, FakeEngine
from own_gateway import fatal_message, gateway
from tiny_tokenizer import EOS, VOCAB

from moe_runtime.protocol.control import Heartbeat, Hello, Progress, Serving, Shutdown


def test_start_then_drain(model_dir: Path) -> None:
    with gateway(model_dir) as (process, engine):
        url = process.wait_serving()
        heard = process.controller.heard
        (hello,) = process.controller.of(Hello)
        assert heard[0] is hello and isinstance(hello, Hello) and hello.pid == process.process.pid
        assert process.controller.of(Progress) and process.controller.of(Heartbeat)
        assert isinstance(process.controller.of(Serving)[0], Serving)

        engine.script = lambda submit: Answer([(65,)] * 20)
        engine.held = True
        answers: list[httpx.Response] = []
        ask = {"prompt": "x", "stream": True}
        thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=ask)))
        thread.start()
        wait_until(lambda: len(engine.open) == 1, "the request to run")
        process.controller.send(Shutdown())
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503, "draining")
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "y"})
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.post(f"{url}/tokenize", json={"prompt": "y"}).json()["count"] == 1
        engine.held = False
        thread.join(30)
        assert answers[0].text.endswith("data: [DONE]\n\n")
        assert process.wait_exit() == 0
        assert len(engine.submitted) == 1


@pytest.mark.parametrize("by", ["drain_timeout_s", "SIGTERM"])
def test_what_cannot_finish_ends_with_an_error_event(model_dir: Path, by: str) -> None:
    patient = by == "SIGTERM"
    with gateway(model_dir, make_config(drain_timeout_s=300.0 if patient else 1.0)) as (process, engine):
        url = process.wait_serving()
        engine.script = lambda submit: Answer([(65,)], finish=None)
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            assert '"text":"' in next(lines)
            if patient:
                process.process.send_signal(signal.SIGTERM)
            else:
                process.controller.send(Shutdown())
            assert "shutting down" in [line for line in lines if line][-1]
        assert process.wait_exit() == 0
        assert engine.aborted


def test_a_taken_port_is_said_and_ends_the_start(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with gateway(model_dir, make_config(port=port)) as (process, _):
            assert str(port) in (message := fatal_message(process)) and "gateway.port" in message


def test_a_directory_without_a_tokenizer_ends_the_start(tmp_path: Path) -> None:
    with gateway(tmp_path) as (process, _):
        assert "tokenizer" in fatal_message(process)


def test_a_lost_attention_node_fails_its_requests_and_the_rest_is_refused(model_dir: Path) -> None:
    with gateway(model_dir) as (process, engine):
        url = process.wait_serving()
        engine.script = lambda submit: Answer([(65,)], finish=None)
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            assert '"text":"' in next(lines)
            engine.stop()
            assert "a0 was lost" in [line for line in lines if line][-1]
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        assert httpx.get(f"{url}/v1/models").status_code == 200


def test_a_stop_during_start_up_ends_it(model_dir: Path) -> None:
    with gateway(model_dir) as (process, _):
        wait_until(lambda: bool(process.controller.of(Hello)), "Hello")
        process.controller.send(Shutdown())
        assert process.wait_exit() == 0


def test_a_dead_parent_ends_the_gateway(model_dir: Path) -> None:
    """The parent here is a shell-like process between this one and the gateway, killed without warning."""
    engine = FakeEngine("a0")
    controller = FakeController(make_config(), model_dir, make_spec(VOCAB, (EOS,)), (engine.start(),))
    command = [sys.executable, "-m", "moe_runtime.gateway", "--node", "gateway0", "--controller", controller.endpoint]
    code = f"import subprocess; subprocess.run({command!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(controller.of(Serving)), "Serving")
        (hello,) = controller.of(Hello)
        assert isinstance(hello, Hello)
        parent.kill()
        parent.wait(10)
        wait_until(lambda: not _alive(hello.pid), "the gateway to end")
    finally:
        parent.kill()
        controller.close()
        engine.stop()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return not (status.exists() and "State:\tZ" in status.read_text())
