"""The experts one node holds, layer by layer, ready to compute: what an FFN node serves, and what unsplit mode calls.

Legend: T tokens, K picks, H hidden, S global slots of a layer.
A layer's experts may differ in size (routed and shared) and in format, so each kind has a bank of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eplb import LayerPlacement, Placement
from moe_runtime.errors import ProtocolError
from moe_runtime.kernels.bank import BankShape, ExpertBank, Weight
from moe_runtime.kernels.registry import expert_bank
from moe_runtime.kernels.workers import Workers
from moe_runtime.models.loader import Checkpoint
from moe_runtime.models.spec import ModelSpec


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's experts on one node.

    index_of_slot: per bank, int64 [S + 1], -1 for slots of other banks and nodes; the last entry serves slot id -1.
    """

    banks: tuple[ExpertBank, ...]
    index_of_slot: tuple[Tensor, ...]
    expert_of_slot_S: np.ndarray
    held_S: np.ndarray
    accepts: Tensor  # bool [S + 1] on the device: held_S, and true for slot id -1

    def __call__(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum over this node's experts, [T, H] in x's dtype. slots_TK: global slot ids, -1 for none."""
        slots_TK = slots_TK.long()
        if slots_TK.device.type != "cpu":
            return self._unchecked(x_TH, slots_TK, weights_TK)
        return self._sum(x_TH, slots_TK, weights_TK)

    def _unchecked(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """On a GPU nobody has looked at the slots, since looking would stop the host: a token with a slot that is not
        here gets NaN, which ends its request where it is sampled."""
        inside_TK = slots_TK.clamp(-1, len(self.held_S) - 1)
        wrong_TK = (inside_TK != slots_TK) | ~self.accepts[inside_TK]
        y_TH = self._sum(x_TH, torch.where(wrong_TK, -1, inside_TK), weights_TK)
        return y_TH.masked_fill(wrong_TK.any(dim=-1, keepdim=True), torch.nan)

    def _sum(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH = None
        for bank, index in zip(self.banks, self.index_of_slot, strict=True):
            part_TH = bank(x_TH, index[slots_TK], weights_TK)
            y_TH = part_TH if y_TH is None else y_TH + part_TH
        return torch.zeros_like(x_TH) if y_TH is None else y_TH

    def check(self, slots: np.ndarray) -> None:
        """Raise ProtocolError naming the first slot id that is out of range or held by another node; for the CPU."""
        total = len(self.held_S)
        bad = slots[(slots < -1) | (slots >= total)]
        if bad.size:
            raise ProtocolError(f"slot id {int(bad[0])} does not exist: this layer has slots 0..{total - 1}")
        foreign = slots[(slots >= 0) & ~self.held_S[slots]]
        if foreign.size:
            raise ProtocolError(
                f"slot {int(foreign[0])} is not on this node, which holds {np.flatnonzero(self.held_S).tolist()}"
            )

    @property
    def nbytes(self) -> int:
        return sum(bank.nbytes for bank in self.banks)


def load_expert_layers(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    placement: Placement,
    node: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float, str], None],
    quant: str | None = None,
) -> tuple[ExpertLayer, ...]:
    """Read one node's experts of every layer, plain ones in `dtype`; quant is model.quant. Raises CheckpointError.

    On the CPU, a layer's experts are shared by as many threads as torch has when this is called.
    """
    workers = Workers(torch.get_num_threads() if device.type == "cpu" else 1)
    load = _Loader(checkpoint, spec, node, dtype, device, quant, workers)
    layers = []
    for index, placed in enumerate(placement.layers):
        progress(index / len(spec.layers), f"experts of layer {index}")
        layers.append(load.layer(index, placed))
    progress(1.0, "experts")
    return tuple(layers)


@dataclass(frozen=True)
class _Loader:
    checkpoint: Checkpoint
    spec: ModelSpec
    node: int
    dtype: torch.dtype
    device: torch.device
    quant: str | None
    workers: Workers

    def layer(self, layer: int, placed: LayerPlacement) -> ExpertLayer:
        slots = placed.slots_on(self.node).tolist()
        held_S = np.zeros(len(placed.expert_of_slot_S), dtype=bool)
        held_S[slots] = True
        kinds: dict[BankShape, list[int]] = {}
        for slot in slots:
            kinds.setdefault(self._kind(layer, int(placed.expert_of_slot_S[slot])), []).append(slot)
        banks, tables = [], []
        for kind, members in kinds.items():
            bank = expert_bank(
                BankShape(len(members), kind.hidden, kind.intermediate, kind.format), self.device, self.workers
            )
            table = torch.full((len(held_S) + 1,), -1, dtype=torch.int64, device=self.device)
            for position, slot in enumerate(members):
                weights = self.checkpoint.expert(layer, int(placed.expert_of_slot_S[slot]), kind.format)
                bank.store(position, self._here(weights.gate_up_2IH), self._here(weights.down_HI))
                table[slot] = position
            banks.append(bank)
            tables.append(table)
        accepts = torch.from_numpy(np.append(held_S, True)).to(self.device)
        return ExpertLayer(tuple(banks), tuple(tables), placed.expert_of_slot_S, held_S, accepts)

    def _kind(self, layer: int, expert: int) -> BankShape:
        """A bank of one such expert: what experts that share a bank have in common."""
        form = self.checkpoint.expert_format(layer, expert, self.dtype, self.quant)
        return BankShape(1, self.spec.hidden, self.spec.layers[layer].ffn.intermediate_of(expert), form)

    def _here(self, weight: Weight) -> Weight:
        return weight.to(self.device)
