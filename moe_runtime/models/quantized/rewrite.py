"""What becomes of each weight of a plain checkpoint: experts and, if asked, attention's linears are quantized.

Everything else is copied as it is. One matrix is in memory at a time.
Legend: N outputs, K inputs, R x C groups.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.models.quantized.calibration import Calibration
from moe_runtime.models.quantized.shards import ShardWriter, TensorPlan
from moe_runtime.models.quantized.source import EXPERT_PARTS, PlainSource
from moe_runtime.models.weight_roles import TensorRole
from moe_runtime.quant.calibrated import can_calibrate, quantize_calibrated
from moe_runtime.quant.checkpoints.written import WrittenGroup, quantization_config, scheme_for
from moe_runtime.quant.formats import Format
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import QuantizedTensor, dequantize

_LINEAR_PARTS = ("q", "k", "v", "o", "lm_head")
# Which modules are quantized, in the spelling of compressed-tensors; the names are those of all families.
_EXPERTS = r"re:.*\.experts\.\d+\..*"
_DENSE = r"re:.*\.(mlp|shared_expert)\.(gate|up|down)_proj$"
_ATTENTION = r"re:.*\.self_attn\.[qkvo]_proj$"
_ROUTERS = r"re:.*\.(gate|shared_expert_gate|router|router\.layer)$"


@dataclass(frozen=True)
class Rewrite:
    """A plain checkpoint and the formats it is to have; attention null leaves attention and LM head plain."""

    source: PlainSource
    experts: Format
    attention: Format | None

    @property
    def unties(self) -> bool:
        """Whether the LM head, tied so far, becomes a quantized weight of its own."""
        return self.source.spec.tied_embeddings and self.attention is not None

    def config(self) -> dict[str, Any]:
        """config.json of the result."""
        dense = any(layer.ffn.shared_intermediate for layer in self.source.spec.layers)
        groups = {"experts": WrittenGroup(self.experts, [_EXPERTS, _DENSE] if dense else [_EXPERTS])}
        ignored = [_ROUTERS]
        if self.attention:
            groups["attention"] = WrittenGroup(self.attention, [_ATTENTION, "lm_head"])
        else:
            ignored += [r"re:.*\.self_attn\..*", "lm_head"]
        changed = {"tie_word_embeddings": False} if self.unties else {}
        return {**self.source.config, **changed, "quantization_config": quantization_config(groups, ignored)}

    def items(self) -> Iterator["Item"]:
        """Every weight of the result, in order."""
        for role in self.source.roles():
            yield Item(self.source, role, self.source.name(role), self._format(role))
        if self.unties:
            yield Item(self.source, TensorRole("embed"), "lm_head.weight", self.attention)

    def _format(self, role: TensorRole) -> Format | None:
        if role.part in EXPERT_PARTS:
            return self.experts
        return self.attention if role.part in _LINEAR_PARTS else None


@dataclass(frozen=True)
class Loss:
    """What quantizing did to some weights: the squares of the error and of the weights, summed."""

    error: float = 0.0
    weight: float = 0.0

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.error + other.error, self.weight + other.weight)

    @property
    def relative(self) -> float:
        """The norm of the error over that of the weights."""
        return (self.error / self.weight) ** 0.5 if self.weight else 0.0


@dataclass(frozen=True)
class Item:
    """One weight of the result, called `name` if it were plain; form null: copied."""

    source: PlainSource
    role: TensorRole
    name: str
    form: Format | None

    def plans(self) -> dict[str, TensorPlan]:
        """Its tensors, by name."""
        shape = self.source.shape(self.role)
        if self.form is None:
            return {self.name: TensorPlan(self.source.dtype(self.role), shape)}
        parts = self._parts(_shapeless(self.form, *shape))
        return {name: TensorPlan(part.dtype, tuple(part.shape)) for name, part in parts.items()}

    def write(self, writer: ShardWriter, calibration: Calibration | None) -> Loss:
        """Read, quantize and write it. Raises CheckpointError where its numbers are not finite."""
        if self.form is None:
            writer.write(self.name, self.source.read(self.role))
            return Loss()
        weight_NK = self.source.read(self.role).float()
        factor_KK = calibration.factor(self.role) if calibration and can_calibrate(self.form) else None
        try:
            if factor_KK is None:
                quantized = quantize(weight_NK, self.form)
            else:
                quantized = quantize_calibrated(weight_NK, factor_KK, self.form)
        except ValueError as error:
            raise CheckpointError(f"tensor {self.name}: {error}") from error
        for name, part in self._parts(quantized).items():
            writer.write(name, part)
        error_NK = dequantize(quantized).sub_(weight_NK)
        return Loss(*(float(x.square().sum(dtype=torch.float64)) for x in (error_NK, weight_NK)))

    def _parts(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        module = self.name.removesuffix(".weight")
        return {module + suffix: part for suffix, part in scheme_for(weight.format).pack(weight).items()}


def _shapeless(form: Format, rows: int, columns: int) -> QuantizedTensor:
    """A weight that has no numbers, to see which tensors it would be."""
    groups_RC = form.groups(rows, columns)
    values = torch.empty(rows, -(-columns // form.packed), dtype=form.dtype, device="meta")
    zeros_RC = torch.empty(groups_RC, dtype=torch.uint8, device="meta") if form.zero_points else None
    return QuantizedTensor(form, columns, values, torch.empty(groups_RC, dtype=form.scales, device="meta"), zeros_RC)


Progress = Callable[[float, str], None]


def write_weights(
    rewrite: Rewrite, writer: ShardWriter, calibration: Calibration | None, progress: Progress
) -> tuple[dict[int, Loss], dict[int, Loss]]:
    """Write every weight: the loss of each layer's experts, and of its attention (under -1 the LM head's)."""
    experts: dict[int, Loss] = {}
    attention: dict[int, Loss] = {}
    items = list(rewrite.items())
    for number, item in enumerate(items):
        progress(number / len(items), f"layer {item.role.layer}" if item.role.layer >= 0 else item.name)
        loss = item.write(writer, calibration)
        if item.form:
            losses = experts if item.role.part in EXPERT_PARTS else attention
            losses[item.role.layer] = losses.get(item.role.layer, Loss()) + loss
    return experts, attention
