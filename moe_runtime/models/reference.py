"""The plain whole-sequence forward: the runtime's own layer functions, dense attention, one expert at a time.

The yardstick for the engine: no paging, no batching, no exchange.
Legend: T tokens, V vocabulary, H hidden, A heads, G KV heads, D head dimension, K picks, N tokens of an expert.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.linear import linear
from moe_runtime.layers.attention_inputs import project_output, project_qkv
from moe_runtime.layers.norm import rms_norm
from moe_runtime.layers.rope import RotaryTable
from moe_runtime.layers.router import route
from moe_runtime.models.spec import LayerSpec, ModelSpec
from moe_runtime.models.weights import AttentionLayerWeights, AttentionWeights, ExpertWeights

ExpertSource = Callable[[int, int], ExpertWeights]


def reference_logits(token_ids_T: Tensor, spec: ModelSpec, attention: AttentionWeights, expert: ExpertSource) -> Tensor:
    """Logits [T, V] of every position of one sequence; `expert(layer, logical expert)` gives the weights."""
    x_TH = attention.embed_VH[token_ids_T] * spec.embedding_scale
    rotary = RotaryTable(spec.rope.inv_freq, spec.rope.scale, x_TH.device)
    cos_TD, sin_TD = rotary(torch.arange(len(token_ids_T), device=x_TH.device), x_TH.dtype)
    for index, (layer, weights) in enumerate(zip(spec.layers, attention.layers, strict=True)):
        normed_TH = rms_norm(x_TH, weights.input_norm_H, spec.norm_eps)
        o_TQ = attend(normed_TH, weights, spec, layer.window, cos_TD, sin_TD)
        x_TH = x_TH + project_output(o_TQ, weights) * spec.residual_scale
        normed_TH = rms_norm(x_TH, weights.post_norm_H, spec.norm_eps)
        x_TH = x_TH + _experts(normed_TH, weights, spec, layer, index, expert) * spec.residual_scale
    x_TH = rms_norm(x_TH, attention.final_norm_H, spec.norm_eps)
    return linear(x_TH, attention.lm_head_VH) / spec.logits_divisor


def attend(
    x_TH: Tensor, weights: AttentionLayerWeights, spec: ModelSpec, window: int | None, cos_TD: Tensor, sin_TD: Tensor
) -> Tensor:
    """Attention's heads [T, Q] of a whole sequence, side by side, before the output projection."""
    q_TAD, k_TGD, v_TGD = project_qkv(x_TH, weights, spec, cos_TD, sin_TD)
    share = spec.heads // spec.kv_heads
    k_TAD, v_TAD = k_TGD.repeat_interleave(share, dim=1), v_TGD.repeat_interleave(share, dim=1)
    scores_ATT = torch.einsum("tad,sad->ats", q_TAD, k_TAD) * spec.attention_scale
    scores_ATT = scores_ATT.masked_fill(~visible(len(x_TH), window, x_TH.device), -torch.inf)
    probabilities_ATT = scores_ATT.softmax(dim=-1, dtype=torch.float32).to(x_TH.dtype)
    return torch.einsum("ats,sad->tad", probabilities_ATT, v_TAD).flatten(1)


def visible(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Whether query row sees key column, bool [T, T]: the past and itself, `window` tokens of it at most."""
    age_TT = torch.arange(tokens, device=device)[:, None] - torch.arange(tokens, device=device)
    return (age_TT >= 0) & (age_TT < (window or tokens))


def _experts(
    x_TH: Tensor, weights: AttentionLayerWeights, spec: ModelSpec, layer: LayerSpec, index: int, expert: ExpertSource
) -> Tensor:
    experts_TK, weights_TK = route(x_TH, weights, spec, layer.ffn)
    y_TH = torch.zeros_like(x_TH)
    for number in experts_TK.unique().tolist():
        rows_N, picks_N = torch.where(experts_TK == number)
        out_NH = expert_mlp(x_TH[rows_N], expert(index, number))
        y_TH.index_add_(0, rows_N, out_NH * weights_TK[rows_N, picks_N, None].to(out_NH.dtype))
    return y_TH


def expert_mlp(x_NH: Tensor, weights: ExpertWeights) -> Tensor:
    """down(silu(gate(x)) * up(x)) of one expert for its tokens."""
    gate_NI, up_NI = linear(x_NH, weights.gate_up_2IH).chunk(2, dim=-1)
    return linear(F.silu(gate_NI) * up_NI, weights.down_HI)
