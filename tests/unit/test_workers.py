"""Experts shared by threads: the same result, every task run, errors raised, thread counts put back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.kernels.grouped_mlp import ExpertBank, _shares, grouped_mlp
from moe_runtime.kernels.workers import Workers


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("inference", [False, True])
def test_shared_experts_give_the_same_bits(tokens: int, inference: bool) -> None:
    torch.manual_seed(tokens)
    bank = ExpertBank(torch.randn(8, 64, 32), torch.randn(8, 32, 32)).packed()
    x_TH, weights_TK = torch.randn(tokens, 32), torch.rand(tokens, 2)
    slots_TK = torch.randint(-1, 8, (tokens, 2))
    with torch.inference_mode(inference):
        alone = grouped_mlp(x_TH, slots_TK, weights_TK, bank)
        shared = grouped_mlp(x_TH, slots_TK, weights_TK, bank, Workers(3))
    assert torch.equal(alone, shared)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_shares_cover_every_expert_that_has_rows_once(counts: list[int], threads: int) -> None:
    shares = _shares(counts, threads)
    assert len(shares) <= threads
    covered = [expert for share in shares for expert in share if counts[expert]]
    assert covered == [expert for expert, count in enumerate(counts) if count]


def test_equal_experts_are_shared_equally() -> None:
    assert [len(share) for share in _shares([4] * 12, 3)] == [4, 4, 4]


def test_an_error_in_any_task_is_raised_and_threads_are_put_back() -> None:
    def fail() -> None:
        raise RuntimeError("task")

    workers, before = Workers(2), torch.get_num_threads()
    for tasks in ([fail, lambda: None], [lambda: None, fail], [fail]):
        with pytest.raises(RuntimeError, match="task"):
            workers.run(tasks)
        assert torch.get_num_threads() == before


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads is 0"):
        Workers(0)
