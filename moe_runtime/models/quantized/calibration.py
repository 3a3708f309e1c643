"""What the weights of a plain model see when it reads a calibration text: layer by layer, for quantize_calibrated.

Legend: T tokens, H hidden, K inputs of a weight, Q heads * D, I intermediate.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.layers.attention_inputs import project_output
from moe_runtime.layers.norm import rms_norm
from moe_runtime.layers.rope import RotaryTable
from moe_runtime.layers.router import route
from moe_runtime.models.loader import Checkpoint
from moe_runtime.models.reference import attend
from moe_runtime.models.weight_roles import TensorRole
from moe_runtime.quant.calibrated import error_factor
from moe_runtime.quant.formats import plain_format

_F32 = plain_format(torch.float32)


class Calibration:
    """The plain model on one text, in float32; it holds the inputs of one layer's weights."""

    def __init__(self, checkpoint: Checkpoint, tokens_T: Tensor) -> None:
        self._checkpoint, self._spec = checkpoint, checkpoint.spec
        self._ends = checkpoint.attention_ends(torch.float32)
        self._x_TH = self._ends.embed_VH[tokens_T] * self._spec.embedding_scale
        rotary = RotaryTable(self._spec.rope.inv_freq, self._spec.rope.scale, self._x_TH.device)
        self._cos_TD, self._sin_TD = rotary(torch.arange(len(tokens_T)), torch.float32)
        self._layer = -1
        self._inputs: dict[TensorRole, Tensor] = {}
        self._factors: dict[TensorRole, Tensor] = {}

    @torch.inference_mode()
    def factor(self, role: TensorRole) -> Tensor | None:
        """The error factor [K, K] of a matrix; None for an expert's that no token has reached.

        Roles must be asked for layer by layer; the LM head comes last (TensorRole("embed") where it is tied).
        """
        while self._layer < role.layer or (role.layer < 0 and self._layer < len(self._spec.layers)):
            self._advance()
        key = _key(role)
        if key not in self._inputs:
            return None
        if key not in self._factors:
            self._factors[key] = error_factor(self._inputs[key])
        return self._factors[key]

    def _advance(self) -> None:
        self._layer += 1
        self._inputs, self._factors = {}, {}
        if self._layer < len(self._spec.layers):
            self._attention()
            self._experts()
        else:
            self._inputs[TensorRole("lm_head")] = self._normed(self._ends.final_norm_H)

    def _attention(self) -> None:
        weights, spec = self._checkpoint.attention_layer(self._layer, torch.float32), self._spec
        normed_TH = self._normed(weights.input_norm_H)
        o_TQ = attend(normed_TH, weights, spec, spec.layers[self._layer].window, self._cos_TD, self._sin_TD)
        self._inputs[TensorRole("qkv", self._layer)] = normed_TH
        self._inputs[TensorRole("o", self._layer)] = o_TQ
        self._x_TH = self._x_TH + project_output(o_TQ, weights) * spec.residual_scale
        normed_TH = self._normed(weights.post_norm_H)
        self._inputs[TensorRole("gate_up", self._layer)] = normed_TH
        self._experts_TK, self._weights_TK = route(normed_TH, weights, spec, spec.layers[self._layer].ffn)

    def _experts(self) -> None:
        x_TH, y_TH = self._inputs[TensorRole("gate_up", self._layer)], torch.zeros_like(self._x_TH)
        for expert in self._experts_TK.unique().tolist():
            rows_N, picks_N = torch.where(self._experts_TK == expert)
            weights = self._checkpoint.expert(self._layer, expert, _F32)
            assert isinstance(weights.gate_up_2IH, Tensor) and isinstance(weights.down_HI, Tensor)
            gate_NI, up_NI = F.linear(x_TH[rows_N], weights.gate_up_2IH).chunk(2, dim=-1)
            acts_NI = F.silu(gate_NI) * up_NI
            self._inputs[TensorRole("down", self._layer, expert)] = acts_NI
            out_NH = F.linear(acts_NI, weights.down_HI)
            y_TH.index_add_(0, rows_N, out_NH * self._weights_TK[rows_N, picks_N, None].to(out_NH.dtype))
        self._x_TH = self._x_TH + y_TH * self._spec.residual_scale

    def _normed(self, norm_H: Tensor) -> Tensor:
        return rms_norm(self._x_TH, norm_H, self._spec.norm_eps)


def _key(role: TensorRole) -> TensorRole:
    """Matrices that see the same inputs share them; all tokens count for gate and up of every expert."""
    if role.layer < 0:
        return TensorRole("lm_head")
    if role.part in ("gate", "up"):
        return TensorRole("gate_up", role.layer)
    return TensorRole("qkv", role.layer) if role.part in ("q", "k", "v") else role
