"""Penalties on tokens that the text already has: which they are, per request, and their effect on a whole batch.

Legend: P rows, V vocabulary, U distinct tokens of one request, N cells of all rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_nodes.decoding.cells import Cells, join

# Dividing logits by less overflows float32 without changing which token is best.
LEAST_REPETITION = 1e-30
_ROOM = 32
_MOST = torch.finfo(torch.float32).max


class TokenHistory:
    """The distinct tokens of one request, and how often each was generated: 0 for those of the prompt alone.

    A function of the tokens, so it is the same whether it grew with the text or was built in one go after a resumption.
    """

    def __init__(self, tokens: Sequence[int], generated_from: int, with_prompt: bool) -> None:
        """with_prompt: only the repetition penalty looks at the prompt."""
        prompt = np.unique(np.array(tokens[:generated_from] if with_prompt else (), np.int64))
        self._place = {token: place for place, token in enumerate(prompt.tolist())}
        self._ids = np.concatenate([prompt, np.zeros(_ROOM, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        self._seen = generated_from
        self.update(tokens)

    @property
    def ids_U(self) -> NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def counts_U(self) -> NDArray[np.float32]:
        return self._counts[: len(self._place)]

    def update(self, tokens: Sequence[int]) -> None:
        """Count what was generated since the last call; `tokens` is the whole text."""
        for token in tokens[self._seen :]:
            place = self._place.get(token)
            if place is None:
                place = self._add(token)
            self._counts[place] += 1
        self._seen = len(tokens)

    def _add(self, token: int) -> int:
        place = len(self._place)
        if place == len(self._ids):
            room = (0, place + _ROOM)
            self._ids, self._counts = np.pad(self._ids, room), np.pad(self._counts, room)
        self._ids[place] = token
        self._place[token] = place
        return place


def apply_penalties(
    logits_PV: Tensor,
    histories: Sequence[tuple[int, TokenHistory]],
    repetition_P: Tensor,
    frequency_P: Tensor,
    presence_P: Tensor,
) -> None:
    """Change float32 logits in place, for the rows named with their histories.

    Repetition (Keskar et al., CTRL, 2019): a positive logit of any token of the history is divided by it, a negative
    one multiplied. Then OpenAI's two for generated tokens: count * frequency + presence is taken off.
    """
    cells = Cells.of([(row, history.ids_U) for row, history in histories], logits_PV)
    counts_N = join([history.counts_U for _, history in histories], logits_PV.device)
    rows_N, flat = cells.rows_N, logits_PV.view(-1)
    x_N, repetition_N = flat[cells.index_N], repetition_P[rows_N].clamp(min=LEAST_REPETITION)
    x_N = torch.where(x_N > 0, x_N / repetition_N, x_N * repetition_N).clamp_(max=_MOST)
    x_N -= counts_N * frequency_P[rows_N] + (counts_N > 0) * presence_P[rows_N]
    flat[cells.index_N] = x_N
