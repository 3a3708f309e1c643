"""The scheduler's laws under any order of events (scheduler_machine.py), and its choices in plain cases."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from scheduler_machine import (
    STOP,
    VOCAB,
    SchedulerMachine,
    make_request,
    make_scheduler,
    next_token,
    outcome_of,
)

from attention_nodes.decoding.outcome import Choice, Outcome
from attention_nodes.scheduling.batch import Batch
from attention_nodes.scheduling.scheduler import Answer, Scheduler
from moe_runtime.errors import OverloadedError, RequestError
from moe_runtime.protocol.messages import SamplingParams, TokenOutput

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def scheduled(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def run_step(scheduler: Scheduler) -> list[tuple[bytes, Answer]]:
    batch = scheduled(scheduler)
    return scheduler.complete(batch, ones(batch))


def ones(batch: Batch) -> list[Outcome]:
    """Every slice that samples gets token 1."""
    return [Outcome(choice=Choice(1)) if piece.samples else Outcome() for piece in batch.slices]


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    return [(piece.request.order, piece.start, piece.count) for piece in batch.slices]


@pytest.mark.parametrize("seed", range(30))
def test_long_runs_under_pressure_keep_the_same_laws(seed: int) -> None:
    """The machine's rules in a random order that keeps the pool full, so that most requests are preempted."""
    dice, machine = random.Random(seed), SchedulerMachine()
    machine.set_up(blocks=34, block_size=1, lanes=seed % 4 + 1, tokens=dice.randint(3, 12), requests=4 + seed % 5)
    for _ in range(400):
        lane = dice.randrange(4)
        match dice.choices(("submit", "schedule", "complete", "abort", "fail"), (15, 50, 50, 2, 1))[0]:
            case "submit":
                scored, length = dice.random() < 0.5, dice.choice((0, *range(12, 30)))
                machine.submit(dice.randint(1, 6), length, dice.random() < 0.2, scored)
            case "schedule":
                machine.schedule(lane)
            case "complete":
                machine.complete(lane)
            case "abort" if machine.all:
                machine.abort_one(dice.choice(machine.all[-12:]))
            case "fail":
                machine.fail(lane)
        machine.blocks_are_conserved()
        machine.counts_are_true()
    assert machine.scheduler.preemptions > 0
    machine.teardown()


def test_lanes_share_the_requests_evenly() -> None:
    scheduler, _ = make_scheduler(lanes=3)
    for order in range(7):
        scheduler.submit(make_request(order, prompt=4, max_tokens=4))
    batches = [scheduler.schedule() for _ in range(3)]
    assert [len(batch.slices) for batch in batches if batch] == [3, 3, 1]
    assert scheduler.schedule() is None


def test_decodes_come_first_then_chunks_then_new_requests_within_the_budget() -> None:
    scheduler, _ = make_scheduler(tokens=8)
    scheduler.submit(make_request(0, prompt=2, max_tokens=9))
    scheduler.submit(make_request(1, prompt=20, max_tokens=9))
    assert spans(scheduled(scheduler)) == [(0, 0, 2), (1, 0, 6)]
    scheduler, _ = make_scheduler(tokens=8)
    scheduler.submit(make_request(0, prompt=2, max_tokens=9))
    scheduler.submit(make_request(1, prompt=10, max_tokens=9))
    run_step(scheduler)
    scheduler.submit(make_request(2, prompt=20, max_tokens=9))
    assert spans(scheduled(scheduler)) == [(0, 2, 1), (1, 6, 4), (2, 0, 3)]


def test_decodes_leave_the_oldest_prompt_a_place() -> None:
    """With a token budget that younger decodes could use up for good, the oldest request's prompt still advances."""
    scheduler, _ = make_scheduler(lanes=2, tokens=2, requests=2)
    scheduler.submit(make_request(0, prompt=9, max_tokens=9))
    first = scheduled(scheduler)
    for order in (1, 2):
        scheduler.submit(make_request(order, prompt=1, max_tokens=30))
    second = scheduled(scheduler)
    assert spans(second) == [(1, 0, 1), (2, 0, 1)]
    scheduler.complete(first, ones(first))
    scheduler.complete(second, ones(second))
    assert spans(scheduled(scheduler)) == [(1, 1, 1), (0, 2, 1)]


def test_the_youngest_idle_request_gives_up_its_blocks_and_keeps_its_tokens() -> None:
    scheduler, pool = make_scheduler(blocks=6, block_size=4)
    old, young = make_request(0, prompt=8, max_tokens=9), make_request(1, prompt=8, max_tokens=9)
    for request in (old, young):
        scheduler.submit(request)
    while not scheduler.preemptions:
        run_step(scheduler)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert young.blocks == [] and young.computed == 0 and young.generated > 0
    while scheduler.running or scheduler.waiting:
        run_step(scheduler)
    assert (old.generated, young.generated) == (9, 9)
    assert pool.free == pool.total


def test_a_preempted_request_is_admitted_before_younger_ones() -> None:
    scheduler, _ = make_scheduler(blocks=6, block_size=4)
    for order in range(4):
        scheduler.submit(make_request(order, prompt=8, max_tokens=9))
    finished = []
    while scheduler.running or scheduler.waiting:
        finished += [output.request_id for _, output in run_step(scheduler) if output.finish_reason]
    assert scheduler.preemptions > 0
    assert finished == ["r0", "r1", "r2", "r3"]


def test_an_aborted_id_may_be_used_again_while_its_step_runs_and_even_if_that_fails() -> None:
    scheduler, pool = make_scheduler()
    scheduler.submit(make_request(0, prompt=3, max_tokens=2, request_id="x"))
    batch = scheduled(scheduler)
    assert scheduler.abort("x")
    scheduler.submit(make_request(1, prompt=3, max_tokens=2, request_id="x"))
    assert scheduler.abort_all(batch) == ()
    outputs = [output for _ in range(2) for _, output in run_step(scheduler)]
    assert [output.finish_reason for output in outputs] == [None, "length"]
    assert pool.free == pool.total


def test_an_id_in_use_is_refused_by_name() -> None:
    scheduler, _ = make_scheduler()
    scheduler.submit(make_request(0, prompt=3, max_tokens=2, request_id="x"))
    with pytest.raises(RequestError, match="'x' is already in use"):
        scheduler.submit(make_request(1, prompt=3, max_tokens=2, request_id="x"))


def test_a_full_queue_says_how_many_wait_and_takes_more_once_it_moved() -> None:
    scheduler, _ = make_scheduler(waiting=2)
    for order in range(2):
        scheduler.submit(make_request(order, prompt=3, max_tokens=2))
    with pytest.raises(OverloadedError, match=r"2 requests are waiting: scheduler\.max_waiting"):
        scheduler.submit(make_request(2, prompt=3, max_tokens=2))
    scheduler.schedule()
    scheduler.submit(make_request(2, prompt=3, max_tokens=2))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fault"),
    [
        (0, 1, "the prompt has 0 tokens and max_tokens is 1: expected at least 1 and 0"),
        (0, 0, "the prompt has 0 tokens and max_tokens is 0: expected at least 1 and 0"),
        (3, -1, "the prompt has 3 tokens and max_tokens is -1: expected at least 1 and 0"),
        (17, 0, "max_tokens is 0: that needs 5 KV blocks of 4 tokens, but the pool has 4"),
        (30, 11, "the prompt has 30 tokens and max_tokens is 11: together 41, but the context holds 40"),
        (10, 8, "max_tokens is 8: that needs 5 KV blocks of 4 tokens, but the pool has 4"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_true_counts(prompt: int, max_tokens: int, fault: str) -> None:
    scheduler, pool = make_scheduler(blocks=4, block_size=4)
    with pytest.raises(RequestError, match=fault):
        scheduler.submit(make_request(0, prompt, max_tokens))
    assert scheduler.waiting == 0 and pool.free == pool.total


def test_the_largest_request_that_fits_runs_to_its_end() -> None:
    """The last token is never fed back, so 10 + 7 tokens need room for 16."""
    scheduler, pool = make_scheduler(blocks=4, block_size=4)
    request = make_request(0, prompt=10, max_tokens=7)
    scheduler.submit(request)
    while scheduler.running or scheduler.waiting:
        run_step(scheduler)
    assert request.generated == 7 and scheduler.preemptions == 0 and pool.free == pool.total


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", {"logit_bias": ((3, 1.0), (VOCAB, 1.0))}),
        ("bad_words", {"bad_words": ((3,), (4, VOCAB))}),
        ("bad_words", {"bad_words": ((VOCAB, 4),)}),
        ("allowed_token_ids", {"allowed_token_ids": (0, VOCAB)}),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_by_the_field_that_has_it(field: str, params: dict[str, Any]) -> None:
    scheduler, _ = make_scheduler()
    request = make_request(0, prompt=3, max_tokens=2)
    request.sampling = SamplingParams(2, **params)
    with pytest.raises(RequestError, match=rf"token id {VOCAB} in {field} is outside the vocabulary 0\.\.{VOCAB - 1}"):
        scheduler.submit(request)
    request.sampling = SamplingParams(2)
    request.tokens[1] = -1
    with pytest.raises(RequestError, match="token id -1 in the prompt is outside"):
        scheduler.submit(request)


def test_an_empty_bad_word_is_refused() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(0, prompt=3, max_tokens=2)
    request.sampling = SamplingParams(2, bad_words=((1,), ()))
    with pytest.raises(RequestError, match="bad_words holds an empty sequence"):
        scheduler.submit(request)


@pytest.mark.parametrize(("budget", "steps"), [(16, 1), (7, 3)])
def test_a_prompt_alone_fills_the_pool_and_ends_without_a_token(budget: int, steps: int) -> None:
    """Its last token is a stop token, which ends nothing: it is the prompt's own."""
    scheduler, pool = make_scheduler(blocks=4, block_size=4, tokens=budget)
    request = make_request(0, prompt=16, max_tokens=0)
    request.tokens[-1] = STOP
    scheduler.submit(request)
    answers = [answer for _ in range(steps) for _, answer in run_step(scheduler)]
    assert answers == [TokenOutput("r0", (), "length")]
    assert scheduler.running == scheduler.waiting == 0 and pool.free == pool.total


def test_scores_of_a_prompt_come_once_in_order_and_before_its_token() -> None:
    scheduler, _ = make_scheduler(tokens=4)
    scheduler.submit(make_request(0, prompt=10, max_tokens=3, scored=True))
    answers = [answer for _ in range(3) for _, answer in run_scored_step(scheduler)]
    assert [[score.logprob for score in answer.prompt_scores] for answer in answers] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9],
        [],
    ]
    assert [answer.token_ids for answer in answers] == [(), (), (), (next_token(make_request(0, 10, 3)),)]


def run_scored_step(scheduler: Scheduler) -> list[tuple[bytes, Answer]]:
    batch = scheduled(scheduler)
    return scheduler.complete(batch, [outcome_of(piece) for piece in batch.slices])


def test_a_resumed_request_owes_no_scores() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(0, prompt=5, max_tokens=4, scored=True)
    request.generated_from = 2
    scheduler.submit(request)
    ((_, answer),) = run_scored_step(scheduler)
    assert answer.prompt_scores == () and len(answer.token_ids) == 1


def test_a_resumed_request_only_generates_what_is_left() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(0, prompt=5, max_tokens=4)
    request.generated_from = 2
    scheduler.submit(request)
    assert [output.finish_reason for _, output in run_step(scheduler)] == ["length"]
    finished = make_request(1, prompt=5, max_tokens=3)
    finished.generated_from = 2
    with pytest.raises(RequestError, match="3 tokens were generated before, but max_tokens is 3"):
        scheduler.submit(finished)
