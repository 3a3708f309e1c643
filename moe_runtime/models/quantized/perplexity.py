"""How well a checkpoint predicts a text, by the plain reference forward, layer by layer.

Legend: T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.models.loader import Checkpoint, open_checkpoint
from moe_runtime.models.reference import reference_logits
from moe_runtime.models.registry import load_spec
from moe_runtime.models.weights import AttentionLayerWeights, ExpertWeights

_DTYPE = torch.float32

Progress = Callable[[float, str], None]


@torch.inference_mode()
def perplexity(model_dir: Path, tokens_T: Tensor, progress: Progress) -> float:
    """exp of the mean negative log likelihood of each token but the first, in float32.

    Quantized weights are dequantized where they are used; activations are not quantized. Weights are read layer by
    layer, each expert when the text needs it.
    """
    spec = load_spec(model_dir)
    checkpoint = open_checkpoint(model_dir, spec)
    layers = len(spec.layers)

    def expert(layer: int, number: int) -> ExpertWeights:
        progress((layer + number / spec.layers[layer].ffn.experts.total) / layers, f"layer {layer}")
        return checkpoint.expert(layer, number, checkpoint.expert_format(layer, number, _DTYPE))

    attention = replace(checkpoint.attention_ends(_DTYPE), layers=_Layers(checkpoint))
    logits_TV = reference_logits(tokens_T, spec, attention, expert)
    return float(F.cross_entropy(logits_TV[:-1].float(), tokens_T[1:]).exp())


@dataclass(frozen=True)
class _Layers(Sequence[AttentionLayerWeights]):
    """Attention's weights, each layer read when it is its turn and then forgotten."""

    checkpoint: Checkpoint

    def __len__(self) -> int:
        return len(self.checkpoint.spec.layers)

    @overload
    def __getitem__(self, index: int) -> AttentionLayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AttentionLayerWeights]: ...
    def __getitem__(self, index: int | slice) -> AttentionLayerWeights | Sequence[AttentionLayerWeights]:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        if index >= len(self):
            raise IndexError(index)
        return self.checkpoint.attention_layer(index, _DTYPE)
