"""What a step's attention needs to know, worked out once for all layers and kernels.

Legend: T tokens of the step, S slices, B tokens a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceSlice:
    """One request's tokens of this step: positions start..start+count-1, and the blocks that hold 0..start+count-1."""

    start: int
    count: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class AttentionShape:
    """What is the same in every step. windows: the distinct sliding windows of the model's layers (None: all)."""

    block_size: int
    heads: int
    kv_heads: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SliceTable:
    """A step's slices as int32 arrays on the CPU; slice s has tables[table_begins[s] : table_begins[s + 1]]."""

    first_rows_S: np.ndarray
    starts_S: np.ndarray
    counts_S: np.ndarray
    table_begins: np.ndarray  # [S + 1]
    tables: np.ndarray

    @classmethod
    def of(cls, slices: Sequence[SequenceSlice], block_size: int) -> "SliceTable":
        counts_S = np.fromiter((piece.count for piece in slices), np.int32, len(slices))
        starts_S = np.fromiter((piece.start for piece in slices), np.int32, len(slices))
        widths_S = -(-(starts_S + counts_S) // block_size)
        tables = [piece.blocks[:width] for piece, width in zip(slices, widths_S.tolist(), strict=True)]
        return cls(
            _begins(counts_S)[:-1],
            starts_S,
            counts_S,
            _begins(widths_S),
            np.concatenate([np.asarray(table, dtype=np.int32) for table in tables])
            if tables
            else np.empty(0, np.int32),
        )

    def positions_and_slots(self, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Each token's position, and where its key and value go (block * B + offset), int64 [T]."""
        rows = np.arange(int(self.counts_S.sum()), dtype=np.int64)
        positions_T = rows + np.repeat(self.starts_S.astype(np.int64) - self.first_rows_S, self.counts_S)
        begins_T = np.repeat(self.table_begins[:-1].astype(np.int64), self.counts_S)
        blocks_T = self.tables[begins_T + positions_T // block_size].astype(np.int64)
        return positions_T, blocks_T * block_size + positions_T % block_size


def _begins(sizes_S: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(sizes_S))).astype(np.int32)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
