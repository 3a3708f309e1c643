"""A state machine that checks the scheduler's laws under any order of events, and helpers to build its parts.

It keeps its own KV cache of (request, position) marks, written as a step would write it: a block that
two requests share, a position that is skipped or computed twice, or blocks freed under a running step show up there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attention_nodes.cache.block_pool import BlockPool
from attention_nodes.decoding.outcome import Choice, Fault, Outcome
from attention_nodes.scheduling.admission import Admission
from attention_nodes.scheduling.batch import Batch, Slice
from attention_nodes.scheduling.request import Request
from attention_nodes.scheduling.scheduler import Answer, Scheduler
from moe_runtime.config import SchedulerConfig
from moe_runtime.errors import OverloadedError, RequestError
from moe_runtime.protocol.messages import RequestFailed, SamplingParams, TokenOutput, TokenScore

VOCAB, CONTEXT = 50, 40
STOP = 49


def make_request(
    order: int, prompt: int, max_tokens: int, request_id: str | None = None, scored: bool = False
) -> Request:
    sampling = SamplingParams(max_tokens, stop_token_ids=(STOP,), prompt_logprobs=0 if scored else None)
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


def outcome_of(piece: Slice) -> Outcome:
    """A score says which token it is of."""
    scores = tuple(TokenScore(float(position), 1) for position in piece.scored)
    return Outcome(scores, Choice(next_token(piece.request)) if piece.samples else None)


@dataclass
class Tracked:
    """What the machine expects of one request."""

    request: Request
    prompt: int
    scored: bool
    seen_preemptions: int = 0
    computed: int = 0
    outputs: int = 0
    scores: list[float] = field(default_factory=list)
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

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 9), st.one_of(st.just(0), st.integers(2, 14))), min_size=2, max_size=6),
        reuse=st.booleans(),
        scored=st.booleans(),
    )
    def submit_all(self, sizes: list[tuple[int, int]], reuse: bool, scored: bool) -> None:
        for prompt, max_tokens in sizes:
            self.submit(prompt, max_tokens, reuse, scored)

    def submit(self, prompt: int, max_tokens: int, reuse: bool, scored: bool = False) -> None:
        order = len(self.all)
        in_use = {tracked.request.request_id for tracked in self.live}
        ended = [t.request.request_id for t in self.all if t.request.request_id not in in_use]
        request = make_request(order, prompt, max_tokens, ended[-1] if ended and reuse else None, scored)
        needed = -(-(prompt + max(max_tokens - 1, 0)) // self.pool.block_size)
        if needed > self.pool.total:
            counts = f"prompt has {prompt} tokens and max_tokens is {max_tokens}: that needs {needed} KV blocks"
            with pytest.raises(RequestError, match=f"{counts}.*pool has {self.pool.total}"):
                self.scheduler.submit(request)
        elif self.scheduler.waiting >= self.max_waiting:
            with pytest.raises(OverloadedError, match=f"^{self.scheduler.waiting} requests are waiting"):
                self.scheduler.submit(request)
        else:
            self.scheduler.submit(request)
            self.all.append(Tracked(request, prompt, scored))

    @rule(lane=st.integers(0, 3))
    def schedule(self, lane: int) -> None:
        lane %= len(self.lanes)
        if self.lanes[lane] is None:
            self.lanes[lane] = self.take_batch()

    @rule(lane=st.integers(0, 3), faulty=st.one_of(st.none(), st.integers(0, 4)))
    def complete(self, lane: int, faulty: int | None = None) -> None:
        """faulty: the number of a slice whose logits turn out broken."""
        if (batch := self.lanes[lane % len(self.lanes)]) is None:
            return
        self.lanes[lane % len(self.lanes)] = None
        self.check_kv(batch)
        outcomes = [outcome_of(piece) for piece in batch.slices]
        if faulty is not None and faulty < len(outcomes):
            outcomes[faulty] = Outcome(fault=Fault("internal", "broken"))
        last = [piece.last for piece in batch.slices]
        answers = iter(self.scheduler.complete(batch, outcomes))
        for piece, outcome, at_end in zip(batch.slices, outcomes, last, strict=True):
            if not piece.request.aborted:
                self.check_answers(self.tracked(piece.request), outcome, at_end, answers)
        assert next(answers, None) is None
        for piece in batch.slices:
            assert not piece.request.in_flight
            assert not (self.tracked(piece.request).ended and piece.request.blocks)

    def check_answers(
        self, tracked: Tracked, outcome: Outcome, at_end: bool, answers: Iterator[tuple[bytes, Answer]]
    ) -> None:
        request = tracked.request
        if outcome.fault is not None:
            failure = RequestFailed(request.request_id, "internal", "broken")
            assert next(answers) == (request.client, failure)
            tracked.ended = True
            return
        if outcome.prompt_scores:
            output = TokenOutput(request.request_id, (), prompt_scores=outcome.prompt_scores)
            assert next(answers) == (request.client, output)
            tracked.scores += [score.logprob for score in output.prompt_scores]
        if not at_end:
            return
        assert tracked.scores == (list(range(1, tracked.prompt)) if tracked.scored else [])
        client, output = next(answers)
        assert (client, output.request_id) == (request.client, request.request_id)
        if request.sampling.max_tokens == 0:
            assert (output.token_ids, output.finish_reason) == ((), "length")
        else:
            (token,) = output.token_ids
            tracked.outputs += 1
            assert outcome.choice is not None and token == outcome.choice.token == request.tokens[-1]
            full = tracked.outputs == request.sampling.max_tokens
            assert output.finish_reason == ("stop" if token == STOP else "length" if full else None)
        assert len(request.tokens) == tracked.prompt + tracked.outputs
        tracked.ended = output.finish_reason is not None

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
