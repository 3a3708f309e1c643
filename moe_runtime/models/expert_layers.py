"""The experts one node holds, layer by layer, ready to compute: what an FFN node serves, and what unsplit mode calls.

Legend: T tokens, K picks, H hidden, S global slots of a layer, N experts of a bank, I intermediate.
A layer's experts may differ in size (routed and shared), so they are stacked in one bank per size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eplb import LayerPlacement, Placement
from moe_runtime.errors import ProtocolError
from moe_runtime.kernels.grouped_mlp import ExpertBank, grouped_mlp
from moe_runtime.kernels.workers import Workers
from moe_runtime.models.loader import Checkpoint
from moe_runtime.models.spec import FfnSpec, ModelSpec


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's experts on one node. index_of_slot: per bank, int64 [S + 1]; the last entry serves slot id -1."""

    banks: tuple[ExpertBank, ...]
    index_of_slot: tuple[Tensor, ...]
    expert_of_slot_S: np.ndarray
    held_S: np.ndarray
    workers: Workers

    def __call__(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum over this node's experts, [T, H] in x's dtype. slots_TK: global slot ids, -1 for none."""
        slots_TK = slots_TK.long()
        y_TH = None
        for bank, index in zip(self.banks, self.index_of_slot, strict=True):
            part_TH = grouped_mlp(x_TH, index[slots_TK], weights_TK, bank, self.workers)
            y_TH = part_TH if y_TH is None else y_TH + part_TH
        return torch.zeros_like(x_TH) if y_TH is None else y_TH

    def check(self, slots: np.ndarray) -> None:
        """Raise ProtocolError naming the first slot id that is out of range or held by another node."""
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
) -> tuple[ExpertLayer, ...]:
    """Read one node's experts of every layer. Raises CheckpointError as the loader does.

    On the CPU, a layer's experts are shared by as many threads as torch has when this is called.
    """
    layers = []
    workers = Workers(torch.get_num_threads() if device.type == "cpu" else 1)
    for index, (layer, placed) in enumerate(zip(spec.layers, placement.layers, strict=True)):
        progress(index / len(spec.layers), f"experts of layer {index}")
        layers.append(_load_layer(checkpoint, spec.hidden, layer.ffn, index, placed, node, dtype, device, workers))
    progress(1.0, "experts")
    return tuple(layers)


def _load_layer(
    checkpoint: Checkpoint,
    hidden: int,
    ffn: FfnSpec,
    layer: int,
    placed: LayerPlacement,
    node: int,
    dtype: torch.dtype,
    device: torch.device,
    workers: Workers,
) -> ExpertLayer:
    slots = placed.slots_on(node).tolist()
    held_S = np.zeros(len(placed.expert_of_slot_S), dtype=bool)
    held_S[slots] = True
    by_size: dict[int, list[int]] = {}
    for slot in slots:
        by_size.setdefault(ffn.intermediate_of(int(placed.expert_of_slot_S[slot])), []).append(slot)
    banks, tables = [], []
    for intermediate, members in by_size.items():
        gate_up = torch.empty(len(members), 2 * intermediate, hidden, dtype=dtype, device=device)
        down = torch.empty(len(members), hidden, intermediate, dtype=dtype, device=device)
        table = torch.full((len(held_S) + 1,), -1, dtype=torch.int64, device=device)
        for position, slot in enumerate(members):
            checkpoint.read_expert(layer, int(placed.expert_of_slot_S[slot]), gate_up[position], down[position])
            table[slot] = position
        banks.append(ExpertBank(gate_up, down).packed())
        tables.append(table)
    return ExpertLayer(tuple(banks), tuple(tables), placed.expert_of_slot_S, held_S, workers)
