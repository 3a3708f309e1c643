"""What parameters make of the logits before anything is chosen: steps 2 to 4 of sampler.py's order, each in one pass
over all rows that need it.

Legend: P rows, V vocabulary.
"""

import math

import torch
from torch import Tensor

from attention_nodes.decoding.cells import Cells, join
from attention_nodes.decoding.masks import apply_masks
from attention_nodes.decoding.penalties import apply_penalties
from attention_nodes.decoding.rows import SampledRows


def process(logits_PV: Tensor, rows: SampledRows) -> None:
    """Change contiguous float32 logits in place."""
    _bias(logits_PV, rows)
    _penalise(logits_PV, rows)
    _ban(logits_PV, rows)
    if masks := rows.masks():
        apply_masks(logits_PV, masks)


def _bias(logits_PV: Tensor, rows: SampledRows) -> None:
    biases = [(row, state.bias) for row, state in enumerate(rows.states) if state.bias is not None]
    if biases:
        values_N = join([values for _, (_, values) in biases], logits_PV.device)
        Cells.of([(row, ids) for row, (ids, _) in biases], logits_PV).add(logits_PV, values_N)


def _penalise(logits_PV: Tensor, rows: SampledRows) -> None:
    histories = [(row, state.history) for row, state in enumerate(rows.states) if state.history is not None]
    if not histories:
        return
    for row, history in histories:
        history.update(rows.requests[row].tokens)
    names = ("repetition", "frequency", "presence")
    apply_penalties(logits_PV, histories, *(rows.column(name, logits_PV.device) for name in names))


def _ban(logits_PV: Tensor, rows: SampledRows) -> None:
    banned = [
        (row, state.bans.banned(request.tokens, request.generated))
        for row, (state, request) in enumerate(zip(rows.states, rows.requests, strict=True))
        if state.bans is not None
    ]
    if banned:
        cells = Cells.of(banned, logits_PV)
        # Added, not written, so that a broken row's NaN stays.
        cells.add(logits_PV, torch.full((len(cells.rows_N),), -math.inf, device=logits_PV.device))
