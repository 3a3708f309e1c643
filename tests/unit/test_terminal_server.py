"""complete and chat against servers good and bad: what is sent, what is printed, and one line for every fault."""

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from terminal_stub import DONE, Script, Stub, delta, events, reply, serving, text

from moe_runtime.cli import run

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    for variable in ("MOE_RUNTIME_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    # A proxy that answers nothing: a loopback address must be reached without it.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with serving() as stub:
        stub.scripts[COMPLETIONS] = events(text("one "), text("two", "stop"), DONE)
        yield stub


def complete(stub: Stub, *arguments: str) -> int:
    return run(["complete", "PROMPT", "--url", stub.url, *arguments])


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_whole_request(stub: Stub, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "0.5", "--max-tokens", "7", "--set", "top_k=40", "--set", r'stop=["\n"]']
    options += ["--set", "min_p=1e-3", "--set", "logit_bias={5: -1}", "--set", "stream_options=null"]
    assert run(["complete", "PROMPT", "--url", stub.url + suffix, *options]) == 0
    assert capsys.readouterr() == ("one two\n", "")
    sent = {"temperature": 0.5, "max_tokens": 7, "top_k": 40, "stop": ["\n"], "min_p": 1e-3, "logit_bias": {"5": -1}}
    assert [(path, body) for path, _, body in stub.received] == [
        ("/v1/models", None),
        (COMPLETIONS, {"model": "first", "prompt": "PROMPT", "stream": True, **sent}),
    ]


def test_a_named_model_is_not_looked_up(stub: Stub) -> None:
    assert complete(stub, "--model", "über/model:1") == 0
    ((_, _, body),) = stub.received
    assert (body["model"], body["stream_options"]) == ("über/model:1", {"include_usage": True})


@pytest.mark.parametrize(
    ("variables", "file", "expected"),
    [
        ({}, None, "none"),
        ({"OPENAI_API_KEY": "sk-o"}, None, "sk-o"),
        ({"OPENAI_API_KEY": "sk-o", "MOE_RUNTIME_API_KEY": "sk-m"}, None, "sk-m"),
        ({"OPENAI_API_KEY": "sk-o", "MOE_RUNTIME_API_KEY": "sk-m"}, "\n  sk-f \nsk-second\n", "sk-f"),
        ({"OPENAI_ADMIN_KEY": "sk-admin"}, None, "none"),
    ],
)
def test_where_the_key_comes_from(
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    file: str | None,
    expected: str,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    path = tmp_path / "key"
    path.write_text(file or "")
    assert complete(stub, *(["--api-key-file", str(path)] if file else [])) == 0
    assert {key for _, key, _ in stub.received} == {f"Bearer {expected}"}


def test_chat_answers_all_of_stdin_and_leaves_reasoning_out(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_stdin(monkeypatch, "a\n/help ü\n".encode())
    thoughts = (delta(reasoning_content="hm"), delta(reasoning="hm"))
    stub.scripts[CHAT] = events(delta(role="assistant", content=""), *thoughts, delta(content="b\n"), delta("stop"))
    assert run(["chat", "--url", stub.url, "--system", "S"]) == 0
    assert capsys.readouterr() == ("b\n", "")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "a\n/help ü"}]
    assert stub.received[-1][2]["messages"] == messages


def test_control_characters_are_shown_and_not_obeyed(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.scripts[COMPLETIONS] = events(text("\x1b]0;t\x07\x9b2J\x7f\b"), text("[red]x\ttab\r\n漢😀\ud800", "stop"))
    assert complete(stub) == 0
    assert capsys.readouterr().out == "␛]0;t␇<9B>2J␡␈[red]x\ttab\n漢😀\ufffd\n"


def ping_until_gone(handler: BaseHTTPRequestHandler) -> None:
    try:
        for _ in range(200):
            handler.wfile.write(b": ping\n\n")
            handler.wfile.flush()
            threading.Event().wait(0.05)
    except OSError:
        pass


def wait_until_gone(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.settimeout(10)
    handler.rfile.read(1)


def break_off(handler: BaseHTTPRequestHandler) -> None:
    """A chunked body without its end."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    event = b'data: {"choices": [{"text": "par"}]}\n\n'
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))


def error(status: int, message: str) -> Script:
    return reply(status, {"error": {"message": message, "type": "t", "param": None, "code": None}})


FAULTS: list[tuple[str, Script, str, str]] = [
    (COMPLETIONS, error(400, "top_k: must be\n at least 1"), "", "the server answered 400: top_k: must be at least 1"),
    (COMPLETIONS, error(401, "No key."), "", "401: No key; give a key with --api-key-file FILE or in MOE_RUNTIME_API"),
    (COMPLETIONS, error(403, "no"), "", "give another key with --api-key-file"),
    (COMPLETIONS, error(404, "no model"), "", "404: no model; check --url (http://127.0.0.1:"),
    (COMPLETIONS, error(429, "busy"), "", "429: busy; try again in a moment"),
    (COMPLETIONS, reply(422, {"detail": [{"msg": "x"}]}), "", 'answered 422: [{"msg": "x"}]'),
    (COMPLETIONS, reply(500, "", "text/plain"), "", "the server answered 500: "),
    (
        COMPLETIONS,
        reply(502, "<h1>Bad\x1b[2J gateway</h1>", "text/html"),
        "",
        "502: <h1>Bad␛[2J gateway</h1>; try again",
    ),
    ("/v1/models", reply(200, "<html></html>", "text/html"), "", "does not answer in OpenAI's form"),
    ("/v1/models", reply(200, {"data": []}), "", "serves no model; name one with --model"),
    ("/v1/models", wait_until_gone, "", "sent nothing for 0.3 s; try again, or wait longer with --timeout"),
    (COMPLETIONS, wait_until_gone, "", "sent nothing for 0.3 s"),
    (COMPLETIONS, events(text("par"), then=wait_until_gone), "par\n", "sent nothing for 0.3 s"),
    (COMPLETIONS, events(text("par"), then=ping_until_gone), "par\n", "sent nothing for 0.3 s"),
    (COMPLETIONS, events(text("par"), {"error": {"message": "node\x07 died"}}), "par\n", "broke off: node␇ died"),
    (COMPLETIONS, break_off, "par\n", "the connection to the server was lost"),
    (COMPLETIONS, events(text("par"), DONE), "par\n", "the server closed the stream before the end"),
    (COMPLETIONS, events(text("par"), "data: {]\n\n"), "par\n", "does not answer in OpenAI's form"),
    (COMPLETIONS, events({"choices": 5}), "", "does not answer in OpenAI's form"),
    (COMPLETIONS, reply(200, {"choices": [{"text": "whole"}]}), "", "closed the stream before the end"),
]


@pytest.mark.parametrize(("path", "script", "printed", "message"), FAULTS)
def test_every_fault_is_one_line_and_exit_code_1(
    stub: Stub, path: str, script: Script, printed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.scripts[path] = script
    assert complete(stub, "--timeout", "0.3") == 1
    out, err = capsys.readouterr()
    assert out == printed
    assert err.startswith("error: ") and message in err and err.count("\n") == 1 and len(err) < 600


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["complete", "x", "--url", "127.0.0.1:9"]) == 1
    assert "cannot reach http://127.0.0.1:9/v1 (Connection refused); start the server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://x"], "expected an address such as http://127.0.0.1:8000"),
        (["--url", "http://"], "expected an address"),
        (["--url", "http://x:99999"], "expected an address"),
        (["--url", "http://x/?a=b"], "expected an address"),
        (["--url", "http://me:secret@x"], "must hold no password"),
        (["--api-key-file", "nowhere"], "--api-key-file nowhere: No such file"),
        (["--api-key-file", "/dev/null"], "holds no key"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--temperature", "nan"], "--temperature: JSON has no such value"),
        (["--set", "top_k"], "'top_k': expected field=value"),
        (["--set", "stop=[a"], "stop: '[a' is not a YAML value"),
        (["--set", "seed=.inf"], "seed: JSON has no such value"),
        (["--set", "user=2024-01-01"], "user: JSON has no such value"),
        (["--set", "model=x"], "--model names the model"),
        (["--set", "stream=false"], "answers always stream"),
        (["--set", "n=2"], "a terminal shows one answer"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["complete", "x", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_help_has_an_example_and_takes_no_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert f"Example: moe-runtime {command}" in capsys.readouterr().out
    assert run([command, "--api-key", "sk"]) == 2


@pytest.mark.parametrize(("content", "message"), [(b"\n", "stdin holds no text"), (b"ab\xff", "byte 2 is 0xff")])
def test_a_stdin_without_text(
    content: bytes, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("chat", "complete"):
        give_stdin(monkeypatch, content)
        assert run([command]) == 2
        assert message in capsys.readouterr().err


def test_the_address_keeps_a_version_of_its_own(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["complete", "x", "--url", f"{stub.url}/api/v3/openai"]) == 1
    assert stub.received[0][0] == "/api/v3/openai/models"


def test_start_needs_nothing_heavy(stub: Stub) -> None:
    code = (
        "import sys; from moe_runtime.cli import run; code = run(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'zmq', 'fastapi', 'numpy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else code)"
    )
    command: list[Any] = [sys.executable, "-c", code, "complete", "x", "--url", stub.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "one two\n"), result.stderr
