"""Triton reads TRITON_INTERPRET when a kernel is defined, so these tests run in a process of their own, which
tests/unit/test_triton_interpreted.py starts; elsewhere they are not collected.

Memory that torch hands out is filled with NaN and the largest integers: what nobody wrote must not be read.
"""

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
