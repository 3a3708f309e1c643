"""The demo model for tests of whole clusters: built once under build/, as `make model` does."""

from pathlib import Path

import pytest

from moe_runtime.models.demo import build_demo_model, default_demo_dir


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    build_demo_model(default_demo_dir(), progress=lambda what: None)
    return default_demo_dir()
