"""When the attention half computes with all its threads: alone always, beside FFN nodes where the work is worth it."""

from collections.abc import Iterator

import msgspec
import pytest
import torch
from tiny_cluster import tiny_spec

from attention_nodes.forward.threads import StepThreads


@pytest.fixture(autouse=True)
def threads_put_back() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def threads_for(alone: bool, tokens: int, sampled: int = 1, layer: int = 0) -> int:
    # 512 x (8 + 2 * 4) x 64 multiply-adds a token: heavy from 31 tokens on; the head's are 512 x 20,000 a row.
    spec = msgspec.structs.replace(tiny_spec(), hidden=512, heads=8, kv_heads=4, head_dim=64, vocab=20_000)
    StepThreads(spec, 2, alone).apply(tokens, sampled, layer)
    return torch.get_num_threads()


def test_small_steps_beside_ffn_nodes_take_one_thread() -> None:
    assert threads_for(alone=False, tokens=16) == 1
    assert threads_for(alone=False, tokens=16, layer=-1) == 1
    assert threads_for(alone=False, tokens=128) == 2


def test_the_head_counts_the_rows_it_samples() -> None:
    last = len(tiny_spec().layers) - 1
    assert threads_for(alone=False, tokens=16, sampled=16, layer=last) == 2
    assert threads_for(alone=False, tokens=128, sampled=1, layer=last) == 1


def test_alone_all_threads_always() -> None:
    assert threads_for(alone=True, tokens=1) == 2
