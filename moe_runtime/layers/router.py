"""The gate: which experts each token visits, and with what weights; always float32.

Legend: T tokens, H hidden, E routed experts, K picks of a token (top_k, then the always-picked expert if there is one).
"""

import torch
from torch import Tensor

from moe_runtime.kernels.linear import linear
from moe_runtime.models.spec import FfnSpec, ModelSpec
from moe_runtime.models.weights import AttentionLayerWeights


def route(x_TH: Tensor, weights: AttentionLayerWeights, spec: ModelSpec, ffn: FfnSpec) -> tuple[Tensor, Tensor]:
    """(experts_TK int64, weights_TK float32) by logical expert; ties go as torch.topk breaks them.

    The always-picked expert (number `ffn.routed`) is the last column, with weight 1 or sigmoid(x . gate).
    """
    x_TH = x_TH.to(torch.float32)
    if not ffn.routed:
        return _always(x_TH, ffn), _always_weight(x_TH, weights)
    assert weights.router_EH is not None
    logits_TE = linear(x_TH, weights.router_EH)
    if spec.router == "topk_softmax":
        top_TK, experts_TK = logits_TE.topk(ffn.top_k, dim=-1)
        weights_TK = top_TK.softmax(dim=-1)
    else:
        weights_TK, experts_TK = logits_TE.softmax(dim=-1).topk(ffn.top_k, dim=-1)
        if spec.norm_topk:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    if not ffn.shared_intermediate:
        return experts_TK, weights_TK
    experts_TK = torch.cat((experts_TK, _always(x_TH, ffn)), dim=-1)
    return experts_TK, torch.cat((weights_TK, _always_weight(x_TH, weights)), dim=-1)


def _always(x_TH: Tensor, ffn: FfnSpec) -> Tensor:
    return torch.full((len(x_TH), 1), ffn.routed, dtype=torch.int64, device=x_TH.device)


def _always_weight(x_TH: Tensor, weights: AttentionLayerWeights) -> Tensor:
    if weights.shared_gate_1H is None:
        return torch.ones(len(x_TH), 1, dtype=torch.float32, device=x_TH.device)
    return linear(x_TH, weights.shared_gate_1H).sigmoid_()
