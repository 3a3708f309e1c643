"""The scheduler's laws under any order of events, and its choices in plain cases.

The state machine keeps its own KV cache of (request, position) marks, written as a step would write it: a block that
two requests share, a position that is skipped or computed twice, or blocks freed under a running step show up there.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attention_nodes.cache.block_pool import BlockPool
from attention_nodes.scheduling.admission import Admission
from attention_nodes.scheduling.batch import Batch
from attention_nodes.scheduling.request import Request
from attention_nodes.scheduling.scheduler import Scheduler
from moe_runtime.config import SchedulerConfig
from moe_runtime.errors import OverloadedError, RequestError
from moe_runtime.protocol.messages import SamplingParams, TokenOutput

VOCAB, CONTEXT = 50, 40
STOP = 49


def make_request(order: int, prompt: int, max_tokens: int, request_id: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens, stop_token_ids=(STOP,))
    tokens = [(order + i) % STOP for i in range(prompt)]
    return Request(request_id or f"r{order}", b"client", tokens, prompt, sampling, order, replica_key=order)


def make_scheduler(
    blocks: int = 100, block_size: int = 4, lanes: int = 1, tokens: int = 256, requests: int = 64, waiting: int = 1000
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(blocks, block_size)
    config = SchedulerConfig(max_batch_tokens=tokens, max_batch_requests=requests, max_waiting=waiting)
    return Scheduler(config, pool, lanes, Admission(pool, CONTEXT, VOCAB)), pool


def next_token(request: Request) -> int:
    """The model: a token that depends on the request and the position alone; now and then a stop token."""
    token = (request.order * 7 + len(request.tokens) * 13) % VOCAB
    return STOP if token == 17 else token


def scheduled(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def run_step(scheduler: Scheduler) -> list[tuple[bytes, TokenOutput]]:
    batch = scheduled(scheduler)
    return scheduler.complete(batch, [1] * len(batch.sampled))


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    return [(piece.request.order, piece.start, piece.count) for piece in batch.slices]


@dataclass
class Tracked:
    """What the machine expects of one request."""

    request: Request
    prompt: int
    seen_preemptions: int = 0
    computed: int = 0
    outputs: int = 0
    ended: bool = False


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, schedules, completes, aborts and fails steps in any order on a tiny pool."""

    @initialize(
        blocks=st.integers(6, 20),
        block_size=st.sampled_from((1, 2, 4)),
        lanes=st.sampled_from((1, 2, 4)),
        tokens=st.sampled_from((9, 5, 3, 1)),
        requests=st.sampled_from((5, 3, 1)),
    )
    def set_up(self, blocks: int, block_size: int, lanes: int, tokens: int, requests: int) -> None:
        self.max_tokens, self.max_requests, self.max_waiting = tokens, requests, 8
        self.scheduler, self.pool = make_scheduler(blocks, block_size, lanes, tokens, requests, self.max_waiting)
        self.lanes: list[Batch | None] = [None] * lanes
        self.kv: dict[int, tuple[int, int]] = {}
        self.all: list[Tracked] = []

    @property
    def live(self) -> list[Tracked]:
        return [tracked for tracked in self.all if not tracked.ended]

    def tracked(self, request: Request) -> Tracked:
        return self.all[request.order]

    @rule(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(2, 14)), min_size=2, max_size=6), reuse=st.booleans())
    def submit_all(self, sizes: list[tuple[int, int]], reuse: bool) -> None:
        for prompt, max_tokens in sizes:
            self.submit(prompt, max_tokens, reuse)

    def submit(self, prompt: int, max_tokens: int, reuse: bool) -> None:
        order = len(self.all)
        in_use = {tracked.request.request_id for tracked in self.live}
        ended = [t.request.request_id for t in self.all if t.request.request_id not in in_use]
        request = make_request(order, prompt, max_tokens, ended[-1] if ended and reuse else None)
        needed = -(-(prompt + max_tokens - 1) // self.pool.block_size)
        if needed > self.pool.total:
            counts = f"prompt has {prompt} tokens and max_tokens is {max_tokens}: that needs {needed} KV blocks"
            with pytest.raises(RequestError, match=f"{counts}.*pool has {self.pool.total}"):
                self.scheduler.submit(request)
        elif self.scheduler.waiting >= self.max_waiting:
            with pytest.raises(OverloadedError, match=f"^{self.scheduler.waiting} requests are waiting"):
                self.scheduler.submit(request)
        else:
            self.scheduler.submit(request)
            self.all.append(Tracked(request, prompt))

    @rule(lane=st.integers(0, 3))
    def schedule(self, lane: int) -> None:
        lane %= len(self.lanes)
        if self.lanes[lane] is None:
            self.lanes[lane] = self.take_batch()

    @rule(lane=st.integers(0, 3))
    def complete(self, lane: int) -> None:
        if (batch := self.lanes[lane % len(self.lanes)]) is None:
            return
        self.lanes[lane % len(self.lanes)] = None
        self.check_kv(batch)
        sampled = [(piece.request, next_token(piece.request)) for piece in batch.sampled]
        expected = [(r, token) for r, token in sampled if not r.aborted]
        outputs = self.scheduler.complete(batch, [token for _, token in sampled])
        assert [(o.request_id, o.token_ids) for _, o in outputs] == [(r.request_id, (t,)) for r, t in expected]
        for (request, token), (client, output) in zip(expected, outputs, strict=True):
            tracked = self.tracked(request)
            tracked.outputs += 1
            assert client == request.client
            assert request.tokens[-1] == token and len(request.tokens) == tracked.prompt + tracked.outputs
            full = tracked.outputs == request.sampling.max_tokens
            assert output.finish_reason == ("stop" if token == STOP else "length" if full else None)
            tracked.ended = output.finish_reason is not None
        for piece in batch.slices:
            assert not piece.request.in_flight
            assert not (self.tracked(piece.request).ended and piece.request.blocks)

    @rule(steps=st.integers(3, 12), kept=st.integers(0, 4))
    def run(self, steps: int, kept: int) -> None:
        """Several steps of all lanes, of which some stay in flight: deep states that single rules rarely reach."""
        for step in range(steps):
            for lane in range(len(self.lanes)):
                self.schedule(lane)
                self.blocks_are_conserved()
            for lane in range(len(self.lanes)):
                if (lane + step) % 5 != kept:
                    self.complete(lane)
                    self.blocks_are_conserved()

    @rule(lane=st.integers(0, 3))
    def fail(self, lane: int) -> None:
        if (batch := self.lanes[lane % len(self.lanes)]) is None:
            return
        self.lanes[lane % len(self.lanes)] = None
        alive = [piece.request for piece in batch.slices if not piece.request.aborted]
        assert list(self.scheduler.abort_all(batch)) == alive
        for piece in batch.slices:
            assert piece.request.blocks == []
            self.tracked(piece.request).ended = True

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_one(data.draw(st.sampled_from(self.all[-12:])))

    def abort_one(self, tracked: Tracked) -> None:
        same_id = [other for other in self.live if other.request.request_id == tracked.request.request_id]
        assert self.scheduler.abort(tracked.request.request_id) == bool(same_id)
        for victim in same_id:
            victim.ended = True
            # Blocks under a running step are still being written.
            assert victim.request.in_flight or victim.request.blocks == []

    def take_batch(self) -> Batch | None:
        idle = [t.request for t in self.live if t.request.blocks and not t.request.in_flight]
        waiting = [t.request for t in self.live if not t.request.blocks]
        batch = self.scheduler.schedule()
        self.check_seniority(idle, waiting)
        if batch is None:
            assert not self.live or any(self.lanes), "requests exist, nothing is in flight, and nothing was scheduled"
        else:
            self.check_batch(batch)
        if idle:
            self.check_oldest(min(idle, key=lambda request: request.order), batch)
        return batch

    def check_batch(self, batch: Batch) -> None:
        assert 1 <= batch.tokens <= self.max_tokens
        assert len(batch.slices) <= self.max_requests
        assert [piece.count > 1 for piece in batch.slices] == sorted(piece.count > 1 for piece in batch.slices)
        in_flight = {piece.request.order for other in self.lanes if other for piece in other.slices}
        for piece in batch.slices:
            request, tracked = piece.request, self.tracked(piece.request)
            assert not tracked.ended and request.order not in in_flight
            in_flight.add(request.order)
            if request.preemptions > tracked.seen_preemptions:
                tracked.seen_preemptions, tracked.computed = request.preemptions, 0
            assert piece.start == tracked.computed and piece.count >= 1 and piece.end <= len(request.tokens)
            tracked.computed = piece.end
            for position in range(piece.start, piece.end):
                self.kv[self.slot(request, position)] = (request.order, position)
        self.check_kv(batch)

    def check_kv(self, batch: Batch) -> None:
        for piece in batch.slices:
            for position in range(piece.end):
                assert self.kv[self.slot(piece.request, position)] == (piece.request.order, position)

    def slot(self, request: Request, position: int) -> int:
        size = self.pool.block_size
        return request.blocks[position // size] * size + position % size

    def check_seniority(self, idle: list[Request], waiting: list[Request]) -> None:
        """Of those that could give way the youngest did; of those that waited the oldest came in, and only where the
        others keep a block of room each.
        """
        assert [r.order for r in idle if not r.blocks] == [r.order for r in idle][sum(bool(r.blocks) for r in idle) :]
        admitted = [request.order for request in waiting if request.blocks]
        assert admitted == [request.order for request in waiting][: len(admitted)]
        assert not admitted or self.pool.free >= self.scheduler.running - 1

    def check_oldest(self, oldest: Request, batch: Batch | None) -> None:
        """It runs, unless it needs a block and all that it could take one from is in flight."""
        if batch is None or oldest not in [piece.request for piece in batch.slices]:
            assert self.pool.free == 0 and oldest.remaining == 1
            younger = [t.request for t in self.all if t.request.blocks and t.request.order > oldest.order]
            assert all(request.in_flight for request in younger)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = [block for tracked in self.all for block in tracked.request.blocks]
        assert len(set(held)) == len(held)
        assert self.pool.free + len(held) == self.pool.total

    @invariant()
    def counts_are_true(self) -> None:
        if not hasattr(self, "pool"):
            return
        with_blocks = sum(bool(t.request.blocks) for t in self.all)
        assert self.scheduler.running == with_blocks
        assert self.scheduler.waiting == sum(not t.request.blocks for t in self.live)
        assert self.scheduler.preemptions == sum(t.request.preemptions for t in self.all)

    def teardown(self) -> None:
        """Left alone, everything ends."""
        if not hasattr(self, "pool"):
            return
        for _ in range(3000):
            if not self.live and not any(self.lanes):
                break
            for lane in range(len(self.lanes)):
                self.schedule(lane)
                self.blocks_are_conserved()
            for lane in reversed(range(len(self.lanes))):
                self.complete(lane)
                self.blocks_are_conserved()
        assert not self.live
        assert self.pool.free == self.pool.total
        assert self.scheduler.running == self.scheduler.waiting == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


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
