"""Temperature, top-k, top-p, min-p and the draw, for a whole batch at once.

Each filter is a threshold on the scaled logit, so that equal logits stand or fall together and no result depends on a
sort's order. The draw is a Gumbel-max over what remains, in two stages: first a group of neighbouring ids by its total
weight, then a token of it. That is as exact as one stage and needs a hundredth of the random numbers; and it is robust
against rounding, since only a near tie of two noisy logarithms can flip.

Legend: P rows, V vocabulary, C sorted candidates, B rows of a block, G groups of M ids.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_nodes.decoding.random import gumbel

# Sorting the whole vocabulary costs 40 times as much as taking the best thousand, which nearly always hold top_p.
_FIRST_CANDIDATES = 1024
_GROUP = 64
# Logits worked on at once: temporaries stay in a core's cache, and need no fresh pages from the system at every step.
_BLOCK_LOGITS = 1 << 19


@dataclass(frozen=True)
class DrawParams:
    """One entry per row: temperature and min_p float32, top_k int64 (the vocabulary's size when off), top_p float64,
    and the draws' keys, int64.
    """

    temperature_P: Tensor
    top_k_P: Tensor
    top_p_P: Tensor
    min_p_P: Tensor
    keys_P: Tensor

    def split(self, rows: int) -> list["DrawParams"]:
        """Blocks of so many rows."""
        columns = (self.temperature_P, self.top_k_P, self.top_p_P, self.min_p_P, self.keys_P)
        return [DrawParams(*block) for block in zip(*(column.split(rows) for column in columns), strict=True)]


def draw(logits_PV: Tensor, best_P: Tensor, params: DrawParams) -> Tensor:
    """Draw one token id per row of logits, int64 [P]; best_P is each row's highest logit, which is finite."""
    on_cpu = logits_PV.device.type == "cpu"
    rows = max(1, _BLOCK_LOGITS // logits_PV.shape[1]) if on_cpu else len(logits_PV)
    blocks = zip(logits_PV.split(rows), best_P.split(rows), params.split(rows), strict=True)
    return torch.cat([_draw_block(*block) for block in blocks])


def _draw_block(logits_BV: Tensor, best_B: Tensor, params: DrawParams) -> Tensor:
    # Shifted by the best logit first: a tiny temperature must not overflow to inf - inf.
    scaled_BV = (logits_BV - best_B.unsqueeze(1)).div_(params.temperature_P.unsqueeze(1))
    weights_BV = _weights(scaled_BV, lowest_drawn(scaled_BV, params))
    weights_BGM = grouped(weights_BV)
    group_B = noisy_groups(weights_BGM, params.keys_P).argmax(dim=-1)
    rows_B = torch.arange(len(group_B), device=group_B.device)
    member_B = noisy_members(weights_BGM[rows_B, group_B], group_B, params.keys_P).argmax(dim=-1)
    return group_B * _GROUP + member_B


def _weights(scaled_BV: Tensor, threshold_B: Tensor) -> Tensor:
    """exp of the scaled logits that may be drawn, 0 elsewhere."""
    if bool((threshold_B == float("-inf")).all()):
        return scaled_BV.exp()
    # Filters leave few: it pays not to look at the others again.
    kept = (scaled_BV >= threshold_B.unsqueeze(1)).nonzero(as_tuple=True)
    return torch.zeros_like(scaled_BV).index_put_(kept, scaled_BV[kept].exp_())


def grouped(weights_BV: Tensor) -> Tensor:
    """Weights by groups of neighbouring ids, [B, G, M]; the last group is filled up with zeros."""
    return F.pad(weights_BV, (0, -weights_BV.shape[1] % _GROUP)).unflatten(1, (-1, _GROUP))


def noisy_groups(weights_BGM: Tensor, keys_B: Tensor) -> Tensor:
    """Logarithms of the groups' weights with their noise, float64 [B, G]; their ids go down from -2."""
    groups_G = torch.arange(weights_BGM.shape[1], device=keys_B.device)
    return weights_BGM.sum(dim=-1, dtype=torch.float64).log_() + gumbel(keys_B.unsqueeze(1), -2 - groups_G)


def noisy_members(weights_BM: Tensor, group_B: Tensor, keys_B: Tensor) -> Tensor:
    """The same for the ids of one group in each row, float64 [B, M]."""
    ids_BM = group_B.unsqueeze(1) * _GROUP + torch.arange(_GROUP, device=keys_B.device)
    return weights_BM.double().log_() + gumbel(keys_B.unsqueeze(1), ids_BM)


def lowest_drawn(scaled_PV: Tensor, params: DrawParams) -> Tensor:
    """The lowest scaled logit that may be drawn, float32 [P]; the best one is 0."""
    vocab = scaled_PV.shape[1]
    threshold_P = torch.log(params.min_p_P)  # -inf when off
    limited = bool((params.top_k_P < vocab).any())
    nucleus = bool((params.top_p_P < 1).any())
    if not limited and not nucleus:
        return threshold_P
    width = min(vocab, max(_FIRST_CANDIDATES, int(params.top_k_P[params.top_k_P < vocab].max()) if limited else 1))
    kept = _filter_sorted(scaled_PV, width, params)
    if kept is None:
        kept = _filter_sorted(scaled_PV, vocab, params)
        assert kept is not None
    return torch.maximum(threshold_P, kept)


def _filter_sorted(scaled_PV: Tensor, width: int, params: DrawParams) -> Tensor | None:
    """Threshold of top-k and top-p from the best `width` candidates, or None when a nucleus may reach beyond them."""
    vocab = scaled_PV.shape[1]
    top_PC = torch.topk(scaled_PV, width, dim=-1).values
    unlimited_P1, nucleus_P1 = (params.top_k_P >= vocab).unsqueeze(1), (params.top_p_P < 1).unsqueeze(1)
    last_P1 = (params.top_k_P.clamp(max=width) - 1).unsqueeze(1)
    kth_P1 = top_PC.gather(1, last_P1).masked_fill(unlimited_P1, float("-inf"))
    if not bool(nucleus_P1.any()):
        return kth_P1.squeeze(1)
    # What top-p is a share of: the whole row, or what top-k left of it. Summed in float64 over the row itself, so that
    # neither the width, which other rows may widen, nor rounding moves a boundary.
    total_P = torch.where(scaled_PV >= kth_P1, scaled_PV.exp(), 0.0).sum(-1, dtype=torch.float64)
    weight_PC = top_PC.exp().double()
    outside_PC = weight_PC.cumsum(-1) - weight_PC >= (params.top_p_P * total_P).unsqueeze(1)
    outside_PC[:, 0] = False
    if width < vocab and bool((~outside_PC[:, -1:] & unlimited_P1 & nucleus_P1).any()):
        return None
    end_P1 = top_PC.masked_fill(outside_PC, float("inf")).amin(dim=-1, keepdim=True)
    return torch.maximum(kth_P1, end_P1.masked_fill(~nucleus_P1, float("-inf"))).squeeze(1)
