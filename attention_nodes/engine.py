"""The engine: keeps every lane busy. Schedule -> layers -> sample -> schedule again, for each lane on its own.

It owns no socket. A service feeds it requests and replies and calls run_ready() whenever one is due; between two
calls every lane in flight waits for experts. There is no barrier: lanes never wait for each other, nor for another
node.
"""

import logging
import time
from collections.abc import Callable

import torch

from attention_nodes.cache.block_pool import BlockPool
from attention_nodes.decoding.finish import finish_step
from attention_nodes.forward.local_experts import LocalExperts
from attention_nodes.forward.model import AttentionModel, ExpertCall
from attention_nodes.forward.remote_experts import RemoteExperts, ReplyError
from attention_nodes.forward.threads import StepThreads
from attention_nodes.lane import Lane
from attention_nodes.scheduling.request import Request
from attention_nodes.scheduling.scheduler import Answer, Scheduler
from attention_nodes.step_metrics import StepMetrics
from moe_runtime.errors import LinkTimeoutError
from moe_runtime.protocol.messages import RequestFailed
from moe_runtime.protocol.payload import Frame

log = logging.getLogger(__name__)

Deliver = Callable[[list[tuple[bytes, Answer]]], None]


class Engine:
    """One attention node's lanes. `deliver` is called after each step with (client, answer) pairs.

    threads: how many to compute with, None for torch's own number throughout.
    """

    def __init__(
        self,
        model: AttentionModel,
        experts: LocalExperts | RemoteExperts,
        scheduler: Scheduler,
        pool: BlockPool,
        lanes: int,
        metrics: StepMetrics,
        deliver: Deliver,
        threads: StepThreads | None = None,
    ) -> None:
        self._model = model
        self._experts = experts
        self.scheduler = scheduler
        self._pool = pool
        self._lanes = [Lane(index) for index in range(lanes)]
        self.metrics = metrics
        self._deliver = deliver
        self._threads = threads

    @property
    def has_ready(self) -> bool:
        return any(lane.ready for lane in self._lanes)

    @property
    def in_flight(self) -> bool:
        return any(not lane.idle for lane in self._lanes)

    @property
    def drained(self) -> bool:
        """No request left and no step under way."""
        return not self.in_flight and not self.scheduler.running and not self.scheduler.waiting

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError, OverloadedError as the scheduler does."""
        self.scheduler.submit(request)

    def start_idle_lanes(self) -> None:
        """Give each idle lane a batch if there is work for it."""
        for lane in self._lanes:
            if lane.idle and (batch := self.scheduler.schedule()) is not None:
                lane.start(batch, self._model.step(batch), self._clock_floor())
                self.metrics.batch_tokens.set(batch.tokens)
                self.metrics.step_tokens.add(batch.tokens)
                self.metrics.step_requests.add(len(batch.slices))

    def run_ready(self) -> None:
        """Advance the ready lane with the least progress by one stretch of computation, if there is one."""
        ready = [lane for lane in self._lanes if lane.ready]
        if ready:
            self._run(min(ready, key=lambda lane: lane.clock))

    def accept(self, node: int, frame: Frame) -> None:
        """Take an FFN node's reply. Raises ProtocolError when it belongs to no lane under way."""
        assert isinstance(self._experts, RemoteExperts)
        try:
            index = self._experts.accept(node, frame)
        except ReplyError as error:
            self._fail(self._lanes[error.lane], str(error))
            return
        if index is not None:
            pending = self._experts.finish(index)
            self._lanes[index].reply = pending.total()
            waited, busy = time.monotonic() - pending.since, pending.busy_s
            self.metrics.experts[pending.call.layer].add(min(busy, waited))
            self.metrics.exchange[pending.call.layer].add(max(0.0, waited - busy))

    def check_replies(self, timeout_s: float) -> None:
        """Raise LinkTimeoutError naming layer and nodes when a reply is overdue."""
        if not isinstance(self._experts, RemoteExperts):
            return
        for lane, pending in self._experts.pending.items():
            waited = time.monotonic() - pending.since
            if waited > timeout_s:
                silent = [self._experts.links[node].peer for node in pending.silent]
                raise LinkTimeoutError(
                    f"no reply for lane {lane}, layer {pending.call.layer} from {', '.join(silent)} "
                    f"after {waited:.1f} s (exchange.reply_timeout_s is {timeout_s:g})"
                )

    def refresh_gauges(self) -> None:
        """Bring the gauges up to date; called before they are read."""
        held = self._pool.total - self._pool.free
        self.metrics.running.set(self.scheduler.running)
        self.metrics.waiting.set(self.scheduler.waiting)
        self.metrics.kv_blocks_held.set(held)
        self.metrics.kv_usage.set(held / self._pool.total)
        self.metrics.preemptions.add(self.scheduler.preemptions - self.metrics.preemptions.value)
        self.metrics.refresh_bubble_share()

    def _clock_floor(self) -> int:
        floor = self._experts.clock_floor if isinstance(self._experts, RemoteExperts) else 0
        return max(floor, min((lane.clock for lane in self._lanes if not lane.idle), default=0))

    def _run(self, lane: Lane) -> None:
        start = time.perf_counter()
        if self._threads and lane.batch:
            self._threads.apply(lane.batch.tokens, lane.batch.head_rows, lane.layer)
        with torch.inference_mode():
            outcome = lane.advance()
            while isinstance(outcome, ExpertCall):
                now = time.perf_counter()
                self.metrics.attention[outcome.layer].add(now - start)
                self.metrics.busy.add(now - start)
                if isinstance(self._experts, RemoteExperts):
                    self._experts.dispatch(lane.index, lane.step_number, lane.clock, outcome)
                    return
                lane.reply = self._experts(outcome)
                start = time.perf_counter()
                self.metrics.experts[outcome.layer].add(start - now)
                self.metrics.busy.add(start - now)
                outcome = lane.advance()
            self._finish(lane, outcome)
        seconds = time.perf_counter() - start
        self.metrics.head.add(seconds)
        self.metrics.busy.add(seconds)

    def _finish(self, lane: Lane, x_TH: torch.Tensor) -> None:
        assert lane.batch is not None
        outcomes = finish_step(self._model.logits, x_TH, lane.batch)
        answers = self.scheduler.complete(lane.finish(), outcomes)
        self.metrics.steps.add()
        self.metrics.generated.add(sum(outcome.choice is not None for outcome in outcomes))
        for _, answer in answers:
            if isinstance(answer, RequestFailed):
                log.error("request %s failed: %s", answer.request_id, answer.message)
        self._deliver(answers)

    def _fail(self, lane: Lane, message: str) -> None:
        """End a lane's step and its requests: something does not fit, so no token of it can be trusted."""
        log.error("step %d of lane %d failed: %s", lane.step_number, lane.index, message)
        assert isinstance(self._experts, RemoteExperts)
        self._experts.abandon(lane.index, lane.step_number)
        requests = self.scheduler.abort_all(lane.finish())
        self.metrics.failed_steps.add()
        self._deliver([(r.client, RequestFailed(r.request_id, "internal", message)) for r in requests])
