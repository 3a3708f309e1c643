"""Bias, penalties, bans and masks on a whole batch equal a slow reference row by row, whatever stands beside a row.

Legend: P rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_reference import processed, request_of
from torch import Tensor

from attention_nodes.decoding.masks import StaticMask
from attention_nodes.decoding.penalties import TokenHistory
from attention_nodes.decoding.process import process
from attention_nodes.decoding.rows import SampledRows
from attention_nodes.scheduling.request import Request
from moe_runtime.protocol.messages import SamplingParams

VOCAB = 37
ids = st.integers(0, VOCAB - 1)
penalties = st.one_of(st.just(0.0), st.floats(-2, 2))
# Few distinct tokens, so that words do occur in histories.
few = st.integers(0, 4)
requests = st.builds(
    request_of,
    st.builds(
        SamplingParams,
        st.just(99),
        min_tokens=st.integers(0, 8),
        stop_token_ids=st.lists(ids, max_size=3).map(tuple),
        presence_penalty=penalties,
        frequency_penalty=penalties,
        repetition_penalty=st.one_of(st.just(1.0), st.floats(0.01, 2)),
        logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=6).map(lambda biases: tuple(biases.items())),
        bad_words=st.lists(
            st.one_of(st.tuples(ids), st.tuples(few, ids), st.tuples(few, few, ids), st.tuples(few, few, few, ids)),
            max_size=6,
        ).map(tuple),
        allowed_token_ids=st.one_of(st.none(), st.lists(ids, max_size=30).map(tuple)),
    ),
    prompt=st.lists(st.one_of(few, ids), min_size=1, max_size=12),
    output=st.lists(st.one_of(few, ids), max_size=40),
)


def fresh(request: Request) -> Request:
    return request_of(
        request.sampling, request.tokens[: request.generated_from], request.tokens[request.generated_from :]
    )


def process_batch(logits_PV: Tensor, requests: Sequence[Request]) -> Tensor:
    logits_PV = logits_PV.clone()
    process(logits_PV, SampledRows.of(requests, logits_PV.shape[1]))
    return logits_PV


@settings(max_examples=150, deadline=None, derandomize=True)
@given(requests=st.lists(requests, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_batch_equals_the_reference_row_by_row_and_each_row_equals_itself_alone(
    requests: list[Request], seed: int
) -> None:
    logits_PV = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    ours_PV = process_batch(logits_PV, requests)
    for row, request in enumerate(requests):
        expected_V = processed(logits_PV[row], request).float()
        torch.testing.assert_close(ours_PV[row], expected_V, rtol=1e-5, atol=1e-5)
        assert torch.equal(process_batch(logits_PV[row : row + 1], [fresh(request)])[0], ours_PV[row])


@settings(max_examples=60, deadline=None, derandomize=True)
@example(tokens=list(range(200)), start=3, with_prompt=True)
@given(
    tokens=st.lists(st.integers(0, 400), min_size=1, max_size=120), start=st.integers(0, 119), with_prompt=st.booleans()
)
def test_a_history_that_grew_is_the_one_built_at_once(tokens: list[int], start: int, with_prompt: bool) -> None:
    start = min(start, len(tokens))
    grown = TokenHistory(tokens[:start], start, with_prompt)
    for end in range(start, len(tokens) + 1):
        grown.update(tokens[:end])
    whole = TokenHistory(tokens, start, with_prompt)
    expected = {token: tokens[start:].count(token) for token in (tokens if with_prompt else tokens[start:])}
    for history in (grown, whole):
        assert dict(zip(history.ids_U.tolist(), history.counts_U.tolist(), strict=True)) == expected


def one_row(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (0,), **rest: Any) -> list[float]:
    return process_batch(torch.tensor([logits], dtype=torch.float32), [request_of(params, prompt, **rest)])[0].tolist()


def test_penalties_look_at_their_own_part_of_the_text() -> None:
    """Token 1 is in the prompt, 2 in the output (twice), 3 in both."""
    text = {"prompt": (1, 1, 1, 3), "output": (2, 3, 2)}
    assert one_row([4.0] * 5, SamplingParams(9, presence_penalty=1.0), **text) == [4, 4, 3, 3, 4]
    assert one_row([4.0] * 5, SamplingParams(9, frequency_penalty=1.0), **text) == [4, 4, 2, 3, 4]
    assert one_row([4.0] * 5, SamplingParams(9, repetition_penalty=2.0), **text) == [4, 2, 2, 2, 4]
    assert one_row([-4.0] * 5, SamplingParams(9, repetition_penalty=2.0), **text) == [-4, -8, -8, -8, -4]


def test_bias_comes_before_the_repetition_penalty_and_the_others_after_it() -> None:
    params = SamplingParams(9, repetition_penalty=2.0, frequency_penalty=1.0, logit_bias=((1, 5.0),))
    assert one_row([0.0, -1.0], params, prompt=(0,), output=(1,)) == [0, 1]


def test_nothing_brings_back_a_token_that_may_not_come() -> None:
    bias = tuple((token, 100.0) for token in range(6))
    history = {"prompt": (0, 1, 2), "output": (3, 4)}
    params = SamplingParams(
        9,
        repetition_penalty=0.1,
        frequency_penalty=-2.0,
        presence_penalty=-2.0,
        logit_bias=bias,
        bad_words=((0,), (4, 1)),
        min_tokens=3,
        stop_token_ids=(2,),
        allowed_token_ids=(0, 1, 2, 4),
    )
    kept = [math.isfinite(logit) for logit in one_row([1.0] * 6, params, **history)]
    assert kept == [False, False, False, False, True, False]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40, 1e-30])
def test_a_tiny_repetition_penalty_overflows_nothing_and_keeps_the_order(penalty: float) -> None:
    five, three, zero, minus = one_row([5, 3, 0, -2], SamplingParams(9, repetition_penalty=penalty), prompt=range(4))
    assert math.inf > five > three > zero > minus
    assert one_row([1e30, -1e30], SamplingParams(9, repetition_penalty=penalty), prompt=(0, 1))[0] < math.inf


def test_a_bad_word_is_looked_for_in_the_whole_text_and_may_be_all_of_it() -> None:
    params = SamplingParams(9, bad_words=((1, 2, 3), (2, 4), (0, 1, 2, 5)))
    assert one_row([0.0] * 6, params, prompt=(1,), output=(2,)) == [0, 0, 0, -math.inf, -math.inf, 0]
    assert one_row([0.0] * 6, params, prompt=(1, 2, 2)) == [0, 0, 0, 0, -math.inf, 0]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_a_static_mask_has_one_bit_per_token(vocab: int) -> None:
    allowed = range(0, vocab, 3)
    words = StaticMask(tuple(allowed), vocab).allowed()
    assert words.dtype == np.int32 and len(words) == -(-vocab // 32)
    bits = [int(words[token // 32]) >> token % 32 & 1 for token in range(len(words) * 32)]
    assert [token for token, bit in enumerate(bits) if bit] == list(allowed)


class Words:
    """A mask given as words; it counts how often it is asked."""

    def __init__(self, words: Sequence[int]) -> None:
        self.words, self.asked, self.accepted = np.array(words, np.int32), 0, list[int]()

    def allowed(self) -> np.ndarray:
        self.asked += 1
        return self.words

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_masks_of_any_origin_meet_in_one_row_and_bits_beyond_the_vocabulary_do_nothing() -> None:
    requests = [request_of(SamplingParams(9)) for _ in range(5)]
    requests[1].mask = Words([-1, -1])
    requests[3].mask = Words([-(2**31), 0b10110])
    requests[4] = request_of(SamplingParams(9, allowed_token_ids=(0, 31, 34)))
    requests[4].mask = Words([-(2**31) + 2, 0b10111])
    kept_PV = process_batch(torch.zeros(5, VOCAB), requests).isfinite()
    assert kept_PV[[0, 1, 2]].all()
    assert kept_PV[3].nonzero().squeeze(1).tolist() == [31, 33, 34, 36]
    assert kept_PV[4].nonzero().squeeze(1).tolist() == [31, 34]
    assert requests[3].mask.asked == requests[4].mask.asked == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(9, bad_words=((2,),)),
        SamplingParams(9, allowed_token_ids=(0,)),
        SamplingParams(9, repetition_penalty=1.5, frequency_penalty=1.0, logit_bias=((2, -5.0),)),
    ],
    ids=["ban", "mask", "penalty"],
)
def test_no_parameter_hides_a_nan(params: SamplingParams) -> None:
    assert math.isnan(one_row([0.0, 1.0, math.nan], params, prompt=(2,))[2])


def test_an_end_of_text_id_beyond_the_vocabulary_bans_nothing_in_the_next_row() -> None:
    far = request_of(SamplingParams(9, min_tokens=3, stop_token_ids=(1, VOCAB + 2)))
    kept_PV = process_batch(torch.zeros(2, VOCAB), [far, request_of(SamplingParams(9))]).isfinite()
    assert (~kept_PV).nonzero().tolist() == [[0, 1]]
