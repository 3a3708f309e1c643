"""How probable the model itself held tokens: scores from logits that no parameter has touched.

Legend: S scored rows, V vocabulary, K best tokens reported, N candidates of all rows for them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.protocol.messages import TokenScore


def score_tokens(logits_SV: Tensor, token_ids: Sequence[int], best: Sequence[int]) -> list[TokenScore]:
    """One token's score per row of float32 logits, with the row's `best` most probable tokens.

    Tokens are in order of logit, equal ones in order of id; a row's score does not depend on the others and their
    `best`. A row with a NaN, or without any finite logit, has logprob NaN.
    """
    logprobs_SV = logits_SV.log_softmax(dim=-1)
    token_S1 = torch.tensor(token_ids, device=logits_SV.device).unsqueeze(1)
    rank_S = (logits_SV > logits_SV.gather(1, token_S1)).sum(-1) + 1
    width = min(max(best), logits_SV.shape[1])
    top_SK = _best(logits_SV, width)
    own = zip(logprobs_SV.gather(1, token_S1).squeeze(1).tolist(), rank_S.tolist(), strict=True)
    tops = zip(top_SK.tolist(), logprobs_SV.gather(1, top_SK).tolist(), best, strict=True)
    return [
        TokenScore(logprob, rank, tuple(zip(ids[:count], logprobs[:count], strict=True)))
        for (logprob, rank), (ids, logprobs, count) in zip(own, tops, strict=True)
    ]


def _best(logits_SV: Tensor, width: int) -> Tensor:
    """Ids of the `width` highest logits, int64 [S, K]. torch.topk alone says nothing about the order of equal ones."""
    if width == 0:
        return torch.empty(len(logits_SV), 0, dtype=torch.int64, device=logits_SV.device)
    least_S1 = logits_SV.topk(width, dim=-1).values[:, -1:]
    rows_N, ids_N = (~(logits_SV < least_S1)).nonzero(as_tuple=True)
    order_N = logits_SV[rows_N, ids_N].argsort(descending=True, stable=True)
    order_N = order_N[rows_N[order_N].argsort(stable=True)]
    first_S1 = torch.searchsorted(rows_N, torch.arange(len(logits_SV), device=logits_SV.device)).unsqueeze(1)
    return ids_N[order_N[first_S1 + torch.arange(width, device=logits_SV.device)]]
