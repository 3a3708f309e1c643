"""From logits to tokens, for a whole batch at once. The order, and why:

1. Scores (logprobs.py) are of the model's own distribution: the same whatever a request's parameters are.
2. logit_bias corrects the model's logits, so all that follows sees what the client made of them.
3. Penalties (penalties.py): repetition first, since it scales by the logit's sign; then frequency and presence, which
   add.
4. Masks, for what may not come at all (bans.py, masks.py): after everything that adds, so that nothing brings back what
   they exclude, and before temperature, so that all the rest is about tokens that may come. Greedy takes the best of
   these, the lowest id among equals, and top_k 1 is greedy by definition, so that they agree on equal logits too.
5. Temperature, then top-k, then top-p over what top-k left, then min-p relative to the best token (draw.py): the order
   of transformers' warpers, each filter working on the distribution that is drawn from.
6. The draw.

Each row depends on its own request alone. What a request did not ask for costs it nothing: steps 1 to 4 touch only the
rows, and where they can only the cells, of those that did.

Legend: P sampled rows, D rows that draw, S scored rows, V vocabulary, N pieces of B logits.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attention_nodes.decoding.draw import DrawParams, draw
from attention_nodes.decoding.logprobs import score_tokens
from attention_nodes.decoding.outcome import NONE_LEFT, NOT_FINITE, Choice, Fault
from attention_nodes.decoding.process import process
from attention_nodes.decoding.random import draw_keys
from attention_nodes.decoding.rows import SampledRows
from attention_nodes.scheduling.request import Request

_PIECE = 64


def sample(logits_PV: Tensor, requests: Sequence[Request]) -> list[Choice | Fault]:
    """One token per row of contiguous float32 logits, which are overwritten; requests[i] says how to choose in row i.

    A row without any token to choose from, or with logits that are not finite, gets a Fault instead.
    """
    rows = SampledRows.of(requests, logits_PV.shape[1])
    scored = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
    own_SV = logits_PV[scored] if scored else None
    process(logits_PV, rows)
    best_P, chosen_P = _best(logits_PV)
    best = best_P.tolist()
    if drawing := [row for row, state in enumerate(rows.states) if state.draws and math.isfinite(best[row])]:
        _draw(logits_PV, best_P, chosen_P, rows, drawing)
    chosen = chosen_P.tolist()
    choices = [
        Choice(token) if math.isfinite(best[row]) else _fault(best[row], rows, row) for row, token in enumerate(chosen)
    ]
    if own_SV is not None:
        counts = [requests[row].sampling.logprobs or 0 for row in scored]
        scores = score_tokens(own_SV, [chosen[row] for row in scored], counts)
        for row, score in zip(scored, scores, strict=True):
            if isinstance(choices[row], Choice):
                choices[row] = NOT_FINITE if math.isnan(score.logprob) else Choice(chosen[row], score)
    return choices


def _best(logits_PV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's highest logit and the lowest id that has it; NaN if there is one. Equals logits_PV.max(dim=-1)."""
    rows, vocab = logits_PV.shape
    if vocab % _PIECE:
        return logits_PV.max(dim=-1)
    # torch finds a maximum ten times as fast as its place, so the place is looked for in one piece of the row only.
    pieces_PNB = logits_PV.view(rows, -1, _PIECE)
    best_P, piece_P = pieces_PNB.amax(dim=-1).max(dim=-1)
    of_row_P = torch.arange(rows, device=logits_PV.device)
    return best_P, piece_P * _PIECE + pieces_PNB[of_row_P, piece_P].max(dim=-1).indices


def _draw(logits_PV: Tensor, best_P: Tensor, chosen_P: Tensor, rows: SampledRows, drawing: list[int]) -> None:
    """Put the drawn tokens into chosen_P, at the rows that draw."""
    device, table = logits_PV.device, rows.table[drawing]
    temperature_D, top_k_D, top_p_D, min_p_D = (
        torch.from_numpy(table[name].copy()).to(device) for name in ("temperature", "top_k", "top_p", "min_p")
    )
    positions = np.array([len(rows.requests[row].tokens) for row in drawing])
    keys_D = torch.from_numpy(draw_keys(table["stream"], positions)).to(device)
    params = DrawParams(temperature_D, top_k_D, top_p_D, min_p_D, keys_D)
    if len(drawing) == len(logits_PV):
        chosen_P.copy_(draw(logits_PV, best_P, params))
        return
    rows_D = torch.tensor(drawing, device=device)
    chosen_P[rows_D] = draw(logits_PV[rows_D], best_P[rows_D], params)


def _fault(best: float, rows: SampledRows, row: int) -> Fault:
    return NONE_LEFT if best < 0 and rows.restricted(row) else NOT_FINITE
