"""The parts of the terminal clients that need no server."""

import asyncio
import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.errors import ConfigError
from moe_runtime.terminal.answer import Answer, summary
from moe_runtime.terminal.commands import Ask, Leave, Say, command_table, interpret, set_command
from moe_runtime.terminal.conversation import Conversation
from moe_runtime.terminal.fields import Fields, parse_field
from moe_runtime.terminal.interrupts import Interrupts
from moe_runtime.terminal.line_input import history_path, make_private
from moe_runtime.terminal.target import Target, base_url
from moe_runtime.terminal.text import MAX_LINE, neutralise, one_line


def test_no_control_character_is_left() -> None:
    everything = "".join(map(chr, range(0x110000 - 1)))
    harmless = neutralise(everything)
    left = {char for char in harmless if ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0}
    assert left == {"\n", "\t"}
    assert neutralise("é漢👩‍👩‍👧 \u200f\n\t~") == "é漢👩‍👩‍👧 \u200f\n\t~"


def test_one_line_is_one_short_line() -> None:
    assert one_line(" a\n\x85 b\u2028c\ud800 ") == "a b c\ufffd"
    assert len(one_line("x" * 10_000)) == MAX_LINE + 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("40", 40),
        ("1e-5", 1e-5),
        ('["\\n", "b"]', ["\n", "b"]),
        ("[a, b]", ["a", "b"]),
        ("{a: {b: false}}", {"a": {"b": False}}),
        ("null", None),
        ("", None),
        ("a=b", "a=b"),
        ("yes", True),
        ('"yes"', "yes"),
    ],
)
def test_values_are_yaml(text: str, value: Any) -> None:
    assert parse_field(f" some.field ={text}") == ("some.field", value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        (" https://host/ ", "https://host/v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("https://host/api/v1/", "https://host/api/v1"),
        ("https://host/v1beta/openai", "https://host/v1beta/openai"),
        ("https://host/vllm", "https://host/vllm/v1"),
    ],
)
def test_base_url(url: str, base: str) -> None:
    assert base_url(url) == base


def test_the_key_is_not_shown() -> None:
    assert "sk-secret" not in repr(Target("u", "sk-secret", None, {}, 1.0))


def test_a_conversation() -> None:
    talk = Conversation("S")
    with pytest.raises(ConfigError, match="nothing has been asked yet"):
        talk.take_back()
    talk.ask("q1")
    talk.answered("a1")
    assert [message["content"] for message in talk.ask("lost")] == ["S", "q1", "a1", "lost"]
    talk.answered("")
    assert [message["content"] for message in talk.messages()] == ["S", "q1", "a1"]
    assert talk.take_back() == "lost"
    assert talk.ask("q2")[-1] == {"role": "user", "content": "q2"}
    talk.answered("half")
    assert [message["role"] for message in talk.messages()] == ["system", *["user", "assistant"] * 2]
    assert (talk.take_back(), talk.take_back()) == ("q2", "q1")
    assert talk.messages() == [{"role": "system", "content": "S"}]
    talk.ask("q")
    talk.reset()
    assert talk.unanswered is None and talk.system == "S"


def test_a_saved_conversation_reads_back_and_is_harmless(tmp_path: Path) -> None:
    talk = Conversation()
    talk.ask("é\x1b[2J")
    talk.answered("漢\x9b2J\x7f")
    path = tmp_path / "talk.json"
    talk.save(path)
    content = path.read_text(encoding="utf-8")
    assert json.loads(content) == {"messages": talk.messages()}
    assert "漢" in content and neutralise(content) == content
    with pytest.raises(ConfigError, match="exists; give another name"):
        talk.save(path)
    with pytest.raises(ConfigError, match="No such file"):
        talk.save(tmp_path / "nowhere" / "talk.json")
    with pytest.raises(ConfigError, match=r"\."):
        talk.save(Path())


def test_lines() -> None:
    fields: Fields = {"top_k": 4}
    commands = command_table([set_command(fields)])
    assert interpret(" a /b ", commands) == Ask(" a /b ")
    assert interpret("//etc is", commands) == Ask("/etc is")
    assert interpret("/exit", commands) == Leave()
    assert interpret("/set", commands) == Say("top_k=4")
    assert interpret('/set  stop=["\\n"] ', commands) == Say('top_k=4\nstop=["\\n"]')
    assert interpret("/set top_k=null", commands) == Say('top_k=null\nstop=["\\n"]')
    assert fields == {"top_k": None, "stop": ["\n"]}
    shown = interpret("/help", commands)
    assert isinstance(shown, Say) and all(name in shown.text for name in commands)
    for line, message in [("/hlep", "did you mean /help?"), ("/etc/x", "see /help"), ("/", "no command /;")]:
        with pytest.raises(ConfigError, match=message):
            interpret(line, commands)
    with pytest.raises(ConfigError, match="expected field=value"):
        interpret("/set x", commands)


@pytest.mark.parametrize(
    ("tokens", "finish", "stopped", "expected"),
    [
        (21, "stop", False, "21 tokens, 10.0 tokens/s, first after 0.25 s"),
        (None, None, True, "about 5 tokens, 2.0 tokens/s, first after 0.25 s, stopped"),
        (1, "stop", False, "1 token, first after 0.25 s"),
        (
            21,
            "length",
            False,
            "21 tokens, 10.0 tokens/s, first after 0.25 s, cut at the length limit (/set max_tokens=N)",
        ),
        (21, "tool_calls", False, "21 tokens, 10.0 tokens/s, first after 0.25 s, ended by tool_calls"),
    ],
)
def test_summary(tokens: int | None, finish: str | None, stopped: bool, expected: str) -> None:
    async def send() -> Any:
        raise AssertionError("not iterated")

    answer = Answer(send, Target("u", None, None, {}, 1.0))
    assert summary(answer, stopped=True) == "0 tokens, stopped"
    answer.tokens, answer.chunks, answer.finish_reason = tokens, 5, finish
    answer.first_s, answer.seconds = 0.25, 2.0
    assert summary(answer, stopped) == expected


def test_ctrl_c_ends_the_work_and_nothing_else() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(30)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
            cleaned.append("closed")

    async def main() -> list[bool]:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)
            return [await interrupts.run(work()), await interrupts.run(asyncio.sleep(0))]

    assert asyncio.run(main()) == [False, True]
    assert cleaned == ["closed"]


def test_the_history_file_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = history_path("chat")
    assert path == tmp_path / "state" / "moe-runtime" / "chat_history"
    make_private(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("kept")
    path.chmod(0o644)
    make_private(path)
    assert (stat.S_IMODE(path.stat().st_mode), path.read_text()) == (0o600, "kept")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_path("chat") == tmp_path / ".local" / "state" / "moe-runtime" / "chat_history"
