"""From logits to tokens, for a whole batch at once.

Order: temperature, then top-k, then top-p over what top-k left, then min-p relative to the best token (the order of
transformers' warpers). Each filter is a threshold on the scaled logit, so that equal logits stand or fall together
and no result depends on a sort's order. The draw is a Gumbel-max over what remains: exact, and robust against
rounding, since only a near tie of two noisy logits can flip.

Legend: P sampled rows, V vocabulary, C sorted candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_nodes.decoding.random import GUMBEL_SPAN, draw_key, gumbel
from attention_nodes.scheduling.request import Request

# Sorting the whole vocabulary costs 40 times as much as taking the best thousand, which nearly always hold top_p.
_FIRST_CANDIDATES = 1024
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of the rows that draw (temperature > 0); rows_P are their places among all sampled rows."""

    rows_P: Tensor
    temperature_P: Tensor
    top_k_P: Tensor  # vocabulary size when unlimited
    top_p_P: Tensor
    min_p_P: Tensor
    keys_P: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], vocab: int, device: torch.device) -> "SamplingBatch | None":
        """None when every row is greedy."""
        drawing = [(row, request) for row, request in enumerate(requests) if request.sampling.temperature > 0]
        if not drawing:
            return None
        params = [request.sampling for _, request in drawing]
        return cls(
            torch.tensor([row for row, _ in drawing], device=device),
            # A temperature that float32 rounds to 0 would give 0 / 0.
            torch.tensor([max(p.temperature, _LEAST_TEMPERATURE) for p in params], dtype=torch.float32, device=device),
            torch.tensor([min(p.top_k, vocab) or vocab for p in params], device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            torch.tensor([draw_key(r.sampling.seed, len(r.tokens)) for _, r in drawing], device=device),
        )


def sample(logits_PV: Tensor, requests: Sequence[Request]) -> list[int]:
    """One token id per row of float32 logits; requests[i] says how to choose in row i."""
    chosen_P = logits_PV.argmax(dim=-1)
    batch = SamplingBatch.of(requests, logits_PV.shape[1], logits_PV.device)
    if batch is not None:
        chosen_P[batch.rows_P] = draw(logits_PV[batch.rows_P], batch)
    return chosen_P.tolist()


def draw(logits_PV: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token id per row, int64 [P]; rows belong to `batch` in order."""
    # Shifted by the best logit first: a tiny temperature must not overflow to inf - inf.
    best_P1 = logits_PV.amax(dim=-1, keepdim=True)
    scaled_PV = (logits_PV - best_P1) / batch.temperature_P.unsqueeze(1)
    threshold_P = torch.maximum(_threshold(scaled_PV, batch), torch.full_like(batch.min_p_P, -GUMBEL_SPAN))
    rows, ids = (scaled_PV >= threshold_P.unsqueeze(1)).nonzero(as_tuple=True)
    noisy_PV = torch.full(scaled_PV.shape, float("-inf"), dtype=torch.float64, device=scaled_PV.device)
    noisy_PV[rows, ids] = scaled_PV[rows, ids].double() + gumbel(batch.keys_P[rows], ids)
    return noisy_PV.argmax(dim=-1)


def _threshold(scaled_PV: Tensor, batch: SamplingBatch) -> Tensor:
    """The lowest scaled logit that may be drawn, float32 [P]; the best one is 0."""
    vocab = scaled_PV.shape[1]
    threshold_P = torch.log(batch.min_p_P)  # -inf when off
    limited = bool((batch.top_k_P < vocab).any())
    nucleus = bool((batch.top_p_P < 1).any())
    if not limited and not nucleus:
        return threshold_P
    width = min(vocab, max(_FIRST_CANDIDATES, int(batch.top_k_P[batch.top_k_P < vocab].max()) if limited else 1))
    kept = _filter_sorted(scaled_PV, width, batch)
    if kept is None:
        kept = _filter_sorted(scaled_PV, vocab, batch)
        assert kept is not None
    return torch.maximum(threshold_P, kept)


def _filter_sorted(scaled_PV: Tensor, width: int, batch: SamplingBatch) -> Tensor | None:
    """Threshold of top-k and top-p from the best `width` candidates, or None when a nucleus may reach beyond them."""
    vocab = scaled_PV.shape[1]
    top_PC = torch.topk(scaled_PV, width, dim=-1).values
    unlimited_P1, nucleus_P1 = (batch.top_k_P >= vocab).unsqueeze(1), (batch.top_p_P < 1).unsqueeze(1)
    last_P1 = (batch.top_k_P.clamp(max=width) - 1).unsqueeze(1)
    kth_P1 = top_PC.gather(1, last_P1).masked_fill(unlimited_P1, float("-inf"))
    if not bool(nucleus_P1.any()):
        return kth_P1.squeeze(1)
    # What top-p is a share of: the whole row, or what top-k left of it. Summed in float64 over the row itself, so that
    # neither the width, which other rows may widen, nor rounding moves a boundary.
    total_P = torch.where(scaled_PV >= kth_P1, scaled_PV.exp(), 0.0).sum(-1, dtype=torch.float64)
    weight_PC = top_PC.exp().double()
    outside_PC = weight_PC.cumsum(-1) - weight_PC >= (batch.top_p_P * total_P).unsqueeze(1)
    outside_PC[:, 0] = False
    if width < vocab and bool((~outside_PC[:, -1:] & unlimited_P1 & nucleus_P1).any()):
        return None
    end_P1 = top_PC.masked_fill(outside_PC, float("inf")).amin(dim=-1, keepdim=True)
    return torch.maximum(kth_P1, end_P1.masked_fill(~nucleus_P1, float("-inf"))).squeeze(1)
