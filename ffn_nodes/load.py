"""What an FFN node counts: tokens per layer and logical expert (each token once, no padding), calls and seconds."""

import numpy as np
import torch
from torch import Tensor

from moe_runtime.models.expert_layers import ExpertLayer
from moe_runtime.models.spec import ModelSpec
from moe_runtime.protocol.control import Sample


class ExpertLoad:
    """Running totals since start. tokens[layer]: int64 [E]."""

    def __init__(self, spec: ModelSpec) -> None:
        self.tokens = [np.zeros(experts.total, dtype=np.int64) for experts in spec.experts]
        self._picks_of_slot: dict[int, Tensor] = {}
        self._expert_of_slot: dict[int, np.ndarray] = {}
        self._calls = np.zeros(len(spec.layers), dtype=np.int64)
        self._messages = np.zeros(len(spec.layers), dtype=np.int64)
        self._rows = np.zeros(len(spec.layers), dtype=np.int64)
        self._seconds = np.zeros(len(spec.layers))

    def count(self, layer: int, experts: ExpertLayer, slots_TK: Tensor, messages: int, seconds: float) -> None:
        """Add one merged call. slots_TK: global slot ids, -1 where a pick is on another node.

        On a GPU tokens are counted there, and fetched when somebody wants to see them.
        """
        if slots_TK.device.type == "cpu":
            slots = slots_TK.numpy().ravel()
            picked = experts.expert_of_slot_S[slots[slots >= 0]]
            self.tokens[layer] += np.bincount(picked, minlength=len(self.tokens[layer]))
        else:
            self._count_on_device(layer, experts, slots_TK)
        self._calls[layer] += 1
        self._messages[layer] += messages
        self._rows[layer] += len(slots_TK)
        self._seconds[layer] += seconds

    def _count_on_device(self, layer: int, experts: ExpertLayer, slots_TK: Tensor) -> None:
        slots = slots_TK.flatten().long().clamp(-1, len(experts.held_S) - 1)
        if layer not in self._picks_of_slot:
            self._picks_of_slot[layer] = torch.zeros(len(experts.held_S) + 1, dtype=torch.int64, device=slots.device)
            self._expert_of_slot[layer] = experts.expert_of_slot_S
        # Slot id -1 counts into the last entry, which nobody reads.
        counts = self._picks_of_slot[layer]
        counts.index_add_(0, slots % len(counts), torch.ones_like(slots))

    def fetch(self) -> None:
        """Bring `tokens` up to date with what was counted on a GPU."""
        for layer, counts in self._picks_of_slot.items():
            picks_S = counts[:-1].cpu().numpy()
            np.add.at(self.tokens[layer], self._expert_of_slot[layer], picks_S)
            counts[:-1] -= torch.from_numpy(picks_S).to(counts.device)

    def samples(self) -> tuple[Sample, ...]:
        """Everything as counters; experts that never had a token are left out."""
        self.fetch()
        out = []
        for layer in range(len(self.tokens)):
            label = {"layer": str(layer)}
            out += [
                Sample("layer_seconds_total", "counter", float(self._seconds[layer]), {**label, "part": "experts"}),
                Sample("ffn_calls_total", "counter", float(self._calls[layer]), label),
                Sample("ffn_messages_total", "counter", float(self._messages[layer]), label),
                Sample("ffn_tokens_total", "counter", float(self._rows[layer]), label),
            ]
            out += [
                Sample("expert_tokens_total", "counter", float(self.tokens[layer][e]), {**label, "expert": str(e)})
                for e in np.flatnonzero(self.tokens[layer]).tolist()
            ]
        return tuple(out)
