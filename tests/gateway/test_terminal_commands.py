"""chat and complete on a real terminal, and in pipes, against the real gateway."""

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from conftest import Cluster
from fake_controller import wait_until
from fake_engine import Answer
from pty_program import ALT_ENTER, COMMAND, CTRL_C, CTRL_D, CTRL_P, ENTER, PtyProgram
from tiny_tokenizer import EOS, TOKENIZER, ids

from moe_runtime.protocol.messages import Submit

TIMING = " first after "
LEAVE = "Ctrl-D or /exit leaves."


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}


def on_pty(cluster: Cluster, command: str, environment: dict[str, str], *arguments: str) -> PtyProgram:
    return PtyProgram([command, "--url", cluster.url, *arguments], environment)


def piped(
    cluster: Cluster, command: str, environment: dict[str, str], *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    whole = [*COMMAND, command, *arguments, "--url", cluster.url]
    return subprocess.run(whole, input=stdin, env=environment, capture_output=True, text=True, timeout=60)


def answers(cluster: Cluster, text: str, finish: str = "stop", failure: tuple[str, str] | None = None) -> list[str]:
    """Let every request be answered with this text, and collect their prompts in the order of asking."""
    prompts: list[str] = []
    tokens = [*ids(text), *([EOS] if failure is None and finish == "stop" else [])]

    def script(submit: Submit) -> Answer:
        prompts.append(TOKENIZER.decode(list(submit.prompt_ids), skip_special_tokens=False))
        limit = submit.sampling.max_tokens
        return Answer([(token,) for token in tokens[:limit]], finish if limit >= len(tokens) else "length", failure)

    cluster.script(script)
    return prompts


def rendered(*texts: str) -> str:
    roles = ["user", "assistant"] * len(texts)
    messages = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, texts, strict=False)]
    return "".join(messages) + "<|im_start|>assistant\n"


def test_a_conversation(cluster: Cluster, environment: dict[str, str], tmp_path: Path) -> None:
    prompts = answers(cluster, "hi there")
    with on_pty(cluster, "chat", environment) as program:
        program.expect(f"tiny/model at {cluster.url}/v1")
        program.say("one")
        assert "\nhi there\n9 tokens, " in program.expect(TIMING)
        program.say("two")
        program.expect(TIMING)
        program.say("/retry")
        program.expect(TIMING)
        program.say("/undo")
        program.expect("taken back: two")
        program.say("/system Be brief.")
        program.expect("the system message is set")
        program.say("/set max_tokens=3")
        program.expect("max_tokens=3\r\n")
        program.ready()
        program.send(b"//etc" + ALT_ENTER + b"lines\\" + ENTER + b"more" + ENTER)
        assert "\nhi \n3 tokens" in program.expect("cut at the length limit")
        program.say(f"/save {tmp_path}/talk.json")
        program.expect("saved in")
        program.say("/reset")
        program.expect("all is forgotten")
        program.say("five")
        program.expect(TIMING)
        program.say("/exit")
        assert program.wait() == 0
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    first, text = ("one", "hi there"), "/etc\nlines\nmore"
    asked = [rendered("one"), rendered(*first, "two"), rendered(*first, "two")]
    assert prompts == [*asked, system + rendered(*first, text), system + rendered("five")]
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in saved] == ["Be brief.", *first, text, "hi "]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_ctrl_c_stops_the_answer_and_frees_the_request(
    cluster: Cluster, environment: dict[str, str], command: str
) -> None:
    prompts = answers(cluster, "endless" * 40)
    cluster.hold(False, step_s=0.03)
    with on_pty(cluster, command, environment, "--max-tokens", "280") as program:
        program.say("one")
        program.expect("endlessend")
        program.send(CTRL_C)
        program.expect("stopped")
        wait_until(lambda: len(cluster.aborted) == 1 and not cluster.open, "the request to be freed")
        after = answers(cluster, "next")
        cluster.hold(False)
        program.say("two")
        program.expect("next\r\n")
        program.expect(TIMING)
        program.ready()
        program.send(CTRL_D)
        assert program.wait() == 0
    if command == "complete":
        assert (prompts, after) == (["one"], ["two"])
    else:
        kept = "<|im_end|>\n<|im_start|>assistant\nendlessend"
        assert after[0].startswith(f"<|im_start|>user\none{kept}") and after[0].endswith(rendered("two"))


def test_ctrl_c_before_the_first_token_leaves_the_question_out(cluster: Cluster, environment: dict[str, str]) -> None:
    cluster.hold()
    with on_pty(cluster, "chat", environment) as program:
        program.say("lost")
        wait_until(lambda: len(cluster.open) == 1, "the request")
        program.send(CTRL_C)
        program.expect("0 tokens, stopped")
        wait_until(lambda: not cluster.open, "the request to be freed")
        prompts = answers(cluster, "next")
        cluster.hold(False)
        program.say("two")
        program.expect(TIMING)
    assert prompts == [rendered("two")]


def test_ctrl_c_at_the_input_drops_it_and_says_how_to_leave(cluster: Cluster, environment: dict[str, str]) -> None:
    prompts = answers(cluster, "yes")
    with on_pty(cluster, "chat", environment) as program:
        program.ready()
        program.send(b"dropped" + CTRL_C)
        program.expect("\x1b[?2004h")
        program.say("kept")
        assert LEAVE not in program.expect(TIMING)
        program.ready()
        program.send(CTRL_C)
        program.expect(LEAVE)
        program.ready()
        program.process.send_signal(signal.SIGINT)
        program.say("more")
        program.expect(TIMING)
        program.ready()
        program.send(CTRL_D)
        assert program.wait() == 0
    assert prompts == [rendered("kept"), rendered("kept", "yes", "more")]


def test_history_lasts_from_run_to_run(cluster: Cluster, environment: dict[str, str], tmp_path: Path) -> None:
    prompts = answers(cluster, "yes")
    with on_pty(cluster, "chat", environment) as program:
        program.say("remember me")
        program.expect(TIMING)
    with on_pty(cluster, "chat", environment, "--no-history") as program:
        program.say("but not me")
        program.expect(TIMING)
    with on_pty(cluster, "chat", environment) as program:
        program.ready()
        program.send(CTRL_P)
        program.expect("remember me")
        program.send(ENTER)
        program.expect(TIMING)
    assert prompts == [rendered("remember me"), rendered("but not me"), rendered("remember me")]
    file = tmp_path / "moe-runtime" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "but not me" not in file.read_text()


def test_a_history_that_cannot_be_kept_is_said_and_stops_nothing(
    cluster: Cluster, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "moe-runtime").write_text("in the way")
    with on_pty(cluster, "chat", environment) as program:
        program.expect("what you type is not remembered")
        program.say("one")
        program.expect(TIMING)


def test_the_model_cannot_command_the_terminal(cluster: Cluster, environment: dict[str, str]) -> None:
    answers(cluster, "\x1b]0;own\x07\x1b[2J\x9b2K[red]\u202f漢😀\tz")
    with on_pty(cluster, "chat", environment, "--max-tokens", "100") as program:
        program.say("x")
        program.expect("␛]0;own␇␛[2J<9B>2K[red]\u202f漢😀\tz\r\n")
        program.expect(TIMING)
        assert b"\x1b[2J" not in program.seen and b"\x1b]0;" not in program.seen and b"\x07" not in program.seen
        assert "\x9b".encode() not in program.seen


def test_faults_are_one_line_and_the_loop_goes_on(cluster: Cluster, environment: dict[str, str]) -> None:
    answers(cluster, "par", failure=("internal", "the node\x1b[2J died"))
    with on_pty(cluster, "chat", environment, "--model", "nope") as program:
        program.say("x")
        assert "404" in program.expect("check --url")
    with on_pty(cluster, "chat", environment, "--set", "top_q=3") as program:
        program.say("x")
        assert "the server answered 400: top_q: unknown field; did you mean top_" in program.expect(
            "(/retry asks again)"
        )
        program.say("/set top_q=null")
        program.expect("top_q=null\r\n")
        program.say("/retry")
        assert "par\nerror: the answer broke off: the node␛[2J died (/retry" in program.expect("asks again)")
        prompts = answers(cluster, "yes")
        program.say("/retry")
        program.expect(TIMING)
    assert prompts == [rendered("x")]


def test_dumb_terminals_get_no_escape_sequence(cluster: Cluster, environment: dict[str, str]) -> None:
    answers(cluster, "yes")
    with on_pty(cluster, "chat", {**environment, "TERM": "dumb"}) as program:
        program.say("x")
        assert "\nyes\n" in program.expect(TIMING)
        program.say("/set top_k=0")
        program.expect("top_k=0\r\n")
        program.say("y")
        assert "error: the server answered 400: top_k" in program.expect("(/retry asks again)")
        program.say("/exit")
        assert program.wait() == 0
        assert b"\x1b" not in program.seen


def test_no_color(cluster: Cluster, environment: dict[str, str]) -> None:
    for variables, red in (({}, True), ({"NO_COLOR": "1"}, False)):
        with on_pty(cluster, "complete", {**environment, **variables}, "--set", "top_k=0") as program:
            program.say("x")
            program.expect("(/retry asks again)")
            assert (b"\x1b[31m" in program.seen) is red


def test_pipes(cluster: Cluster, environment: dict[str, str]) -> None:
    prompts = answers(cluster, "é\x1b[31m")
    for arguments, stdin in ((["a b"], ""), (["-"], "a b\n"), ([], "a b")):
        result = piped(cluster, "complete", environment, *arguments, stdin=stdin)
        assert (result.returncode, result.stdout, result.stderr) == (0, "é␛[31m\n", "")
    result = piped(cluster, "chat", environment, stdin="a\n\nb\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, "é␛[31m\n", "")
    assert prompts == ["a b", "a b", "a b", rendered("a\n\nb")]


def test_a_fault_in_a_pipe_is_on_stderr_with_exit_code_1(cluster: Cluster, environment: dict[str, str]) -> None:
    answers(cluster, "par", failure=("internal", "the node died"))
    result = piped(cluster, "complete", environment, "x")
    assert (result.returncode, result.stdout) == (1, "par\n")
    assert result.stderr == "error: the answer broke off: the node died\n"


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_ctrl_c_in_a_pipe_ends_with_130_and_frees_the_request(
    cluster: Cluster, environment: dict[str, str], command: str
) -> None:
    answers(cluster, "endless" * 40)
    cluster.hold(False, step_s=0.03)
    whole = [*COMMAND, command, "--url", cluster.url, "--max-tokens", "280"]
    with subprocess.Popen(whole, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.close()
        assert process.stdout.read(4) == b"endl"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    wait_until(lambda: len(cluster.aborted) == 1 and not cluster.open, "the request to be freed")


def test_a_reader_that_leaves_ends_the_answer_quietly(cluster: Cluster, environment: dict[str, str]) -> None:
    answers(cluster, "endless" * 40)
    cluster.hold(False, step_s=0.03)
    whole = [*COMMAND, "complete", "x", "--url", cluster.url, "--max-tokens", "280"]
    with subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(4) == b"endl"
        process.stdout.close()
        assert (process.wait(30), process.stderr.read()) == (141, b"")
    wait_until(lambda: not cluster.open, "the request to be freed")
