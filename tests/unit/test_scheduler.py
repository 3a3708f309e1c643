"""The scheduler's laws under any order of events (scheduler_machine.py), and its choices in plain cases."""

import random

import pytest
from hypothesis import HealthCheck, settings
from scheduler_machine import VOCAB, SchedulerMachine, make_request, make_scheduler

from attention_nodes.scheduling.batch import Batch
from attention_nodes.scheduling.scheduler import Scheduler
from moe_runtime.errors import OverloadedError, RequestError
from moe_runtime.protocol.messages import TokenOutput

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def scheduled(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def run_step(scheduler: Scheduler) -> list[tuple[bytes, TokenOutput]]:
    batch = scheduled(scheduler)
    return scheduler.complete(batch, [1] * len(batch.sampled))


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
                machine.submit(dice.randint(1, 6), dice.randint(12, 29), dice.random() < 0.2)
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
    scheduler.complete(first, [])
    scheduler.complete(second, [1, 1])
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
        (0, 1, "the prompt has 0 tokens and max_tokens is 1: expected at least 1 of each"),
        (3, 0, "the prompt has 3 tokens and max_tokens is 0: expected at least 1 of each"),
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


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(0, prompt=3, max_tokens=2)
    request.tokens[1] = VOCAB
    with pytest.raises(RequestError, match=rf"token id {VOCAB} is outside the vocabulary 0\.\.{VOCAB - 1}"):
        scheduler.submit(request)


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
