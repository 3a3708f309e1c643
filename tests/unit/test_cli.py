"""The command line: mistakes are one line and exit code 2; --help stays quick."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moe_runtime.cli import run
from moe_runtime.config import load_config


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command"),
        (["lunch"], "Did you mean 'launch'?"),
        (["launch"], "Missing argument 'CONFIG'"),
        (["launch", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
        (["launch", "CONFIG", "--prot", "1"], "--port"),
        (["launch", "CONFIG", "--port", "x"], "'--port'"),
        (["launch", "CONFIG", "--port", "99999"], "gateway.port is 99999"),
        (["launch", "CONFIG", "--set", "cluster.fn_nodes=2"], "did you mean cluster.ffn_nodes?"),
        (["launch", "CONFIG", "--ask", "a", "--greet", "b"], "give one of them"),
        (["demo-model"], "Missing option '--out'"),
        (["demo-model", "--out", "x", "--fused"], "give --random FAMILY too"),
        (["demo-model", "--out", "x", "--random", "gpt2"], "'gpt2'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([config if word == "CONFIG" else word for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["launch", "check", "demo-model"])
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert f"Example: moe-runtime {command}" in capsys.readouterr().out


def test_check_prints_a_configuration_that_reads_back(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", config, "--set", "exchange.lanes=3"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config(printed) == load_config(Path(config), ["exchange.lanes=3"])
    assert yaml.safe_load(printed.read_text())["exchange"]["lanes"] == 3


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from moe_runtime.cli import run; run(['--help']); run(['launch', '--help']);"
        "heavy = {'torch', 'transformers', 'zmq', 'fastapi'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_random_model_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny"
    assert run(["demo-model", "--out", str(out), "--random", "mixtral"]) == 0
    assert (out / "config.json").is_file()
    assert "random mixtral checkpoint" in capsys.readouterr().out
