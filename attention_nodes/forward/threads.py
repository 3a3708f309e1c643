"""How many threads a stretch of the attention half computes with: all where the work is worth it, else one.

Beside FFN nodes on the same cores a second thread is not free: it spins for a moment after each piece of work, and that
moment is when the FFN nodes start.
"""

from dataclasses import dataclass

import torch

from moe_runtime.models.spec import ModelSpec

# Multiply-adds of a layer's q, k and v projection below which a second thread costs as much as it saves (measured).
_WORTH_SHARING = 16_000_000


@dataclass(frozen=True)
class StepThreads:
    """`threads` are this node's; `alone`: no other process computes on its cores (unsplit), so all are always taken."""

    spec: ModelSpec
    threads: int
    alone: bool

    def apply(self, tokens: int, head_rows: int, layer: int) -> None:
        """Set torch's thread count for what follows layer `layer` (-1: the step's start) of a batch.

        head_rows: tokens that the LM head is run for, to sample or to score them.
        """
        torch.set_num_threads(self.threads if self.alone or self._heavy(tokens, head_rows, layer) else 1)

    def _heavy(self, tokens: int, head_rows: int, layer: int) -> bool:
        spec = self.spec
        if layer == len(spec.layers) - 1:
            return head_rows * spec.hidden * spec.vocab >= _WORTH_SHARING
        return tokens * spec.hidden * (spec.heads + 2 * spec.kv_heads) * spec.head_dim >= _WORTH_SHARING
