"""Places in a batch's logits, gathered from requests that each touch a few tokens of their own row.

Legend: P rows, V vocabulary, N cells: the chosen (row, token id) places of all rows, flat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Cells:
    """rows_N int64, and index_N int64 into the flat logits: row * V + token id."""

    rows_N: Tensor
    index_N: Tensor

    @classmethod
    def of(cls, ids_by_row: Sequence[tuple[int, NDArray[np.int64]]], logits_PV: Tensor) -> "Cells":
        """Cells of (row, its token ids) pairs, in that order."""
        rows, ids = zip(*ids_by_row, strict=True)
        rows_N = np.repeat(np.array(rows, np.int64), [len(part) for part in ids])
        index_N = rows_N * logits_PV.shape[1] + np.concatenate(ids)
        return cls(*(torch.from_numpy(array).to(logits_PV.device) for array in (rows_N, index_N)))

    def add(self, logits_PV: Tensor, values_N: Tensor) -> None:
        """Add in place. NaN stays NaN, whatever is added."""
        logits_PV.view(-1).index_add_(0, self.index_N, values_N)


def join(parts: Sequence[NDArray[np.float32]], device: torch.device) -> Tensor:
    """The parts' values in one float32 tensor [N], in the order of the cells' parts."""
    return torch.from_numpy(np.concatenate(parts)).to(device)
