"""Which tokens may come next, as bitmasks over the vocabulary: a list that the client gave, or a grammar's state.

Legend: M rows that have a mask, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


class TokenMask(Protocol):
    """The tokens that one request may draw next, following its text. Attached to a Request as `mask`.

    The request's text moves it: Request.append calls accept() for every generated token, in order, once each, the one
    that ends the text included. Who submits a request that resumes has the mask accept its resumed tokens first.
    Preemption does not touch it, as no token is taken back. The sampler calls allowed() at most once between two
    accept()s, and keeps the array no longer than until the next one, so an implementation may reuse its memory.
    """

    def allowed(self) -> NDArray[np.int32]:
        """The mask, int32 [W]: bit t % 32 of word t // 32 says whether token t may come. Bits from V on are ignored.

        No bit at all ends the request with a failure of kind `invalid`.
        """
        ...

    def accept(self, token: int) -> None:
        """The text has grown by this token."""
        ...


class StaticMask:
    """The same tokens at every step."""

    def __init__(self, token_ids: Sequence[int], vocab: int) -> None:
        bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
        bits[np.array(token_ids, np.int64)] = 1
        self._words_W = np.packbits(bits, bitorder="little").view("<i4")

    def allowed(self) -> NDArray[np.int32]:
        return self._words_W

    def accept(self, token: int) -> None:
        pass


def apply_masks(logits_PV: Tensor, masks: Sequence[tuple[int, Sequence[TokenMask]]]) -> None:
    """Set what is not allowed to -inf in place, for the rows named with their masks; all masks of a row must allow it.

    NaN stays NaN, so that a mask does not hide a broken row.
    """
    words_MW = np.stack([np.bitwise_and.reduce([mask.allowed() for mask in of_row]) for _, of_row in masks])
    rows_M = torch.tensor([row for row, _ in masks], device=logits_PV.device)
    bytes_MB = torch.from_numpy(words_MW.astype("<i4").view(np.uint8)).to(logits_PV.device)
    penalty_MV = F.embedding(bytes_MB.int(), _penalty_of_byte(logits_PV.device)).view(len(masks), -1)
    logits_PV.index_add_(0, rows_M, penalty_MV[:, : logits_PV.shape[1]])


def _penalty_of_byte(device: torch.device) -> Tensor:
    """What eight tokens get for each value of their byte, float32 [256, 8]: 0 where the bit is set, else -inf."""
    bytes_11, bit_8 = torch.arange(256, device=device).unsqueeze(1), torch.arange(8, device=device)
    return torch.zeros(256, 8, device=device).masked_fill_((bytes_11 >> bit_8) & 1 == 0, float("-inf"))
