"""A lane: one batch in flight, from schedule to sampled tokens, on its own clock."""

from dataclasses import dataclass

from torch import Tensor

from attention_nodes.forward.model import ExpertCall, Step
from attention_nodes.scheduling.batch import Batch


@dataclass(slots=True)
class Lane:
    """Idle when `batch` is None; ready when it has a layer's `reply` or was just started; else it waits for experts."""

    index: int
    step_number: int = -1
    # Layers done so far, in virtual time: an idle lane joins at its peers' least progress.
    clock: int = 0
    # The last layer that was computed up to its experts; -1 before the first.
    layer: int = -1
    batch: Batch | None = None
    step: Step | None = None
    reply: Tensor | None = None
    fresh: bool = False

    @property
    def idle(self) -> bool:
        return self.batch is None

    @property
    def ready(self) -> bool:
        return self.fresh or self.reply is not None

    def start(self, batch: Batch, step: Step, clock_floor: int) -> None:
        assert self.idle
        self.batch, self.step, self.fresh = batch, step, True
        self.step_number += 1
        self.layer = -1
        self.clock = max(self.clock, clock_floor)

    def advance(self) -> ExpertCall | Tensor:
        """Compute up to the next layer's experts, or to the end: an ExpertCall, or the step's last hidden states."""
        assert self.step is not None
        reply, self.reply, self.fresh = self.reply, None, False
        try:
            # A generator's first send must be None.
            call = self.step.send(reply)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value
        self.clock += 1
        self.layer = call.layer
        return call

    def finish(self) -> Batch:
        """Back to idle; returns the batch that ran."""
        assert self.batch is not None and self.step is not None
        batch = self.batch
        self.step.close()
        self.batch = self.step = self.reply = None
        self.fresh = False
        return batch
