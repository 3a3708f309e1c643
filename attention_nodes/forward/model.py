"""The attention node's half of the model: one step of one lane as a generator that pauses wherever experts are needed.

The generator yields an ExpertCall per layer and is sent the experts' weighted sum; it returns the last hidden states,
and `logits` makes logits of those rows that somebody wants to see.
Whoever drives it decides where experts run, so the layer loop is the same split and unsplit.

Legend: T tokens of the step, H hidden, K picks of a token, V vocabulary, P rows for the head.
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_nodes.cache.kv_store import KvStore
from attention_nodes.scheduling.batch import Batch
from moe_runtime.kernels.attention_plan import SequenceSlice
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.paged_attention import AttentionPlan, paged_attention, plan_attention
from moe_runtime.layers.attention_inputs import project_output, project_qkv
from moe_runtime.layers.norm import rms_norm
from moe_runtime.layers.rope import RotaryTable
from moe_runtime.layers.router import route
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.weights import AttentionWeights


@dataclass(frozen=True)
class ExpertCall:
    """One layer's work for the experts; experts_TK int64 logical ids, weights_TK float32, replica_keys_T int64."""

    layer: int
    x_TH: Tensor
    experts_TK: Tensor
    weights_TK: Tensor
    replica_keys_T: Tensor


Step = Generator[ExpertCall, Tensor, Tensor]


class AttentionModel:
    """Weights, KV cache and the layer loop. Any number of steps may be in progress at once, on disjoint requests."""

    def __init__(self, spec: ModelSpec, weights: AttentionWeights, kv: KvStore) -> None:
        self.spec = spec
        self._weights = weights
        self._kv = kv
        self._device = weights.embed_VH.device
        self._dtype = weights.embed_VH.dtype
        self._rope = RotaryTable(spec.rope.inv_freq, spec.rope.scale, self._device)
        self._windows = tuple(dict.fromkeys(layer.window for layer in spec.layers))

    def step(self, batch: Batch) -> Step:
        """Run one batch; returns x_TH, the hidden states of all its tokens after the last layer."""
        spec, weights = self.spec, self._weights
        plan = self._plan(batch)
        keys_T = torch.tensor(
            [s.request.replica_key for s in batch.slices for _ in range(s.count)], device=self._device
        )
        cos_TD, sin_TD = self._rope(plan.positions_T, self._dtype)
        x_TH = F.embedding(self._token_ids(batch), weights.embed_VH)
        if spec.embedding_scale != 1.0:
            x_TH = x_TH * spec.embedding_scale
        for index, (layer_spec, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
            h_TH = rms_norm(x_TH, layer.input_norm_H, spec.norm_eps)
            q_TAD, k_TGD, v_TGD = project_qkv(h_TH, layer, spec, cos_TD, sin_TD)
            self._kv.write(index, plan.slots_T, k_TGD, v_TGD)
            attended_TQ = paged_attention(
                q_TAD, self._kv.keys[index], self._kv.values[index], plan, layer_spec.window, spec.attention_scale
            )
            x_TH = torch.add(x_TH, project_output(attended_TQ, layer), alpha=spec.residual_scale)
            h_TH = rms_norm(x_TH, layer.post_norm_H, spec.norm_eps)
            experts_TK, weights_TK = route(h_TH, layer, spec, layer_spec.ffn)
            y_TH = yield ExpertCall(index, h_TH, experts_TK, weights_TK, keys_T)
            x_TH = torch.add(x_TH, y_TH, alpha=spec.residual_scale)
        return x_TH

    def logits(self, x_PH: Tensor) -> Tensor:
        """Final norm and LM head: float32 [P, V] for rows of a step's hidden states."""
        x_PH = rms_norm(x_PH, self._weights.final_norm_H, self.spec.norm_eps)
        logits_PV = linear(x_PH, self._weights.lm_head_VH).float()
        return logits_PV if self.spec.logits_divisor == 1.0 else logits_PV / self.spec.logits_divisor

    def _plan(self, batch: Batch) -> AttentionPlan:
        slices = [SequenceSlice(piece.start, piece.count, piece.request.blocks) for piece in batch.slices]
        return plan_attention(
            slices,
            self._kv.block_size,
            self.spec.heads,
            self.spec.kv_heads,
            self._windows,
            self._dtype,
            self._device,
        )

    def _token_ids(self, batch: Batch) -> Tensor:
        ids = [token for piece in batch.slices for token in piece.request.tokens[piece.start : piece.end]]
        return torch.tensor(ids, device=self._device)
