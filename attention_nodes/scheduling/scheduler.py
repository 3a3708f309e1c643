"""Continuous batching: which requests a lane takes into its next step, and who gives up KV blocks when they run out.

Rules
- A lane takes its share of all requests, at most max_batch_tokens tokens and max_batch_requests slices: first running
  requests with one token to go (decode), then chunks of prompts, then new requests, each group in order of arrival.
  The oldest idle request always has a place among them.
- A request is admitted when blocks for all its present tokens are free, and it gets them at once; later it grows
  block by block. When none is free, the youngest idle request behind it in the order is preempted: its blocks go
  back, and its KV is recomputed later from the tokens it has.
- No deadlock: every admitted request fits the pool alone, only younger requests are preempted for older ones, and a
  request in flight comes back by itself. So the oldest request always gets what it needs.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence

from attention_nodes.cache.block_pool import BlockPool
from attention_nodes.decoding.outcome import Choice, Outcome
from attention_nodes.scheduling.admission import Admission
from attention_nodes.scheduling.batch import Batch, Slice
from attention_nodes.scheduling.request import Request
from moe_runtime.config import SchedulerConfig
from moe_runtime.errors import OverloadedError, RequestError
from moe_runtime.protocol.messages import RequestFailed, TokenOutput

Answer = TokenOutput | RequestFailed


class Scheduler:
    """Owns all requests of a node and their blocks. Used by one thread; never reads a clock."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, lanes: int, admission: Admission) -> None:
        self._config = config
        self._pool = pool
        self._lanes = lanes
        self._admission = admission
        self._requests: dict[str, Request] = {}
        self._running: dict[int, Request] = {}  # keyed by order of arrival
        self._waiting: deque[Request] = deque()  # by order of arrival, preempted ones in front
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError with true counts if it can never run, OverloadedError if the queue is
        full.
        """
        self._admission.check(request)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already in use")
        if len(self._waiting) >= self._config.max_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests are waiting: scheduler.max_waiting is reached")
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks, at the end of its step if it is in flight. False if unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.aborted = True
        if not request.in_flight:
            self._drop(request)
        return True

    def abort_all(self, batch: Batch) -> tuple[Request, ...]:
        """End a step that failed: its live requests are dropped with their blocks and returned."""
        alive = tuple(piece.request for piece in batch.slices if not piece.request.aborted)
        for request in alive:
            del self._requests[request.request_id]
        for piece in batch.slices:
            piece.request.in_flight = False
            self._drop(piece.request)
        return alive

    def schedule(self) -> Batch | None:
        """The next batch for an idle lane, or None when nothing can run now. Its requests are in flight until
        complete().
        """
        share = self._share()
        budget = self._config.max_batch_tokens
        slices: list[Slice] = []
        idle = [request for _, request in sorted(self._running.items()) if not request.in_flight]
        decodes = [request for request in idle if request.remaining == 1]
        chunks = [request for request in idle if request.remaining > 1]
        # Younger decodes leave the oldest request a place, or they could keep its prompt from ever ending.
        kept = 1 if chunks and chunks[0] is idle[0] else 0
        budget = kept + self._take_running(decodes, slices, budget - kept, share - kept)
        budget = self._take_running(chunks, slices, budget, share)
        self._admit(slices, budget, share)
        for piece in slices:
            piece.request.in_flight = True
        slices.sort(key=lambda piece: piece.count > 1)
        return Batch(tuple(slices)) if slices else None

    def complete(self, batch: Batch, outcomes: Sequence[Outcome]) -> list[tuple[bytes, Answer]]:
        """Take what a finished step came to, one outcome per slice; returns what to send, by client."""
        answers: list[tuple[bytes, Answer]] = []
        for piece, outcome in zip(batch.slices, outcomes, strict=True):
            request = piece.request
            request.in_flight = False
            if request.aborted:
                self._drop(request)
                continue
            request.computed = piece.end
            answers += ((request.client, answer) for answer in self._take(piece, outcome))
        return answers

    def _take(self, piece: Slice, outcome: Outcome) -> list[Answer]:
        request, scores, answers = piece.request, outcome.prompt_scores, list[Answer]()
        if outcome.fault is not None:
            self._forget(request)
            return [RequestFailed(request.request_id, outcome.fault.kind, outcome.fault.message)]
        if scores:
            request.prompt_scored += len(scores)
            answers.append(TokenOutput(request.request_id, (), prompt_scores=scores))
        if piece.last:
            answers.append(self._grow_text(request, outcome.choice))
        return answers

    def _grow_text(self, request: Request, choice: Choice | None) -> TokenOutput:
        """No choice: nothing but the prompt was asked for, and it is done."""
        if choice is not None:
            request.append(choice.token)
        reason = request.finish_reason()
        if reason:
            self._forget(request)
        tokens = () if choice is None else (choice.token,)
        scores = () if choice is None or choice.score is None else (choice.score,)
        return TokenOutput(request.request_id, tokens, reason, scores)

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._drop(request)

    def _share(self) -> int:
        everyone = min(len(self._running) + len(self._waiting), self._lanes * self._config.max_batch_requests)
        return min(self._config.max_batch_requests, -(-everyone // self._lanes))

    def _take_running(self, requests: Iterable[Request], slices: list[Slice], budget: int, share: int) -> int:
        for request in requests:
            if budget == 0 or len(slices) >= share:
                break
            if request.order not in self._running:
                continue  # preempted a moment ago, for an older one
            count = min(request.remaining, budget)
            if self._grow(request, request.computed + count):
                slices.append(Slice(request, request.computed, count))
                budget -= count
        return budget

    def _admit(self, slices: list[Slice], budget: int, share: int) -> None:
        while self._waiting and budget and len(slices) < share:
            request = self._waiting[0]
            needed = self._pool.blocks_for(len(request.tokens))
            # One block of room for each running request: else a preempted one comes back only to be preempted again.
            if needed + len(self._running) > self._pool.free:
                return
            blocks = self._pool.allocate(needed)
            assert blocks is not None
            self._waiting.popleft()
            request.blocks = blocks
            self._running[request.order] = request
            count = min(request.remaining, budget)
            slices.append(Slice(request, 0, count))
            budget -= count

    def _grow(self, request: Request, tokens: int) -> bool:
        """Give the request blocks for this many tokens, preempting younger idle ones; False when it has to wait.

        Only decodes grow, older ones first, so nobody who gives way has a place in the batch already.
        """
        missing = self._pool.blocks_for(tokens) - len(request.blocks)
        if missing <= 0:
            return True
        while (blocks := self._pool.allocate(missing)) is None:
            victim = max(
                (other for other in self._running.values() if other.order > request.order and not other.in_flight),
                key=lambda other: other.order,
                default=None,
            )
            if victim is None:
                return False
            self._preempt(victim)
        request.blocks.extend(blocks)
        return True

    def _preempt(self, request: Request) -> None:
        del self._running[request.order]
        self._pool.release(request.blocks)
        request.blocks, request.computed = [], 0
        request.preemptions += 1
        self.preemptions += 1
        position = next((i for i, other in enumerate(self._waiting) if other.order > request.order), len(self._waiting))
        self._waiting.insert(position, request)

    def _drop(self, request: Request) -> None:
        if self._running.pop(request.order, None) is None:
            with contextlib.suppress(ValueError):
                self._waiting.remove(request)
        self._pool.release(request.blocks)
        request.blocks = []
