"""One real cluster of a tiny random model, split over two FFN nodes, for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.serving.reference import Reference
from tests.serving.server import Server, tiny_cluster, write_tiny_model

PROMPT, TOKENS = "The committee met twice", 8


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    torch.set_num_threads(1)
    return Reference(model_dir)


@pytest.fixture(scope="session")
def expected(reference: Reference) -> str:
    """The greedy text of PROMPT, by transformers."""
    return reference.greedy_text(PROMPT, TOKENS)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Server]:
    with tiny_cluster(tmp_path_factory.mktemp("config"), model_dir) as server:
        yield server


@pytest.fixture
def server(shared_server: Server, expected: str) -> Iterator[Server]:
    """The cluster; after each test the next request is answered right, every process lives, and nothing is left."""
    nodes = shared_server.nodes
    yield shared_server
    assert shared_server.text(PROMPT, max_tokens=TOKENS) == expected
    assert shared_server.nodes == nodes and len(nodes) == 4
    shared_server.wait_empty()
