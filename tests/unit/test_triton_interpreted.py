"""Runs tests/interpreted, where every Triton kernel meets plain torch under Triton's interpreter, on the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent / "interpreted"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("file", sorted(path.name for path in TESTS.glob("test_*.py")))
def test_under_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "--no-header", "-p", "no:cacheprovider", str(TESTS / file)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0, f"tests in {file} failed: their output is above"
