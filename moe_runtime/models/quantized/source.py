"""A plain checkpoint matrix by matrix, experts apart even where they are stored fused."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.errors import ConfigError
from moe_runtime.models.registry import FAMILIES, read_config
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.table_check import check_table
from moe_runtime.models.tensor_table import FLOAT_DTYPES, read_table
from moe_runtime.models.weight_reader import WeightReader
from moe_runtime.models.weight_roles import TensorRole, name_of

EXPERT_PARTS = ("gate", "up", "down")


class PlainSource:
    """Raises ConfigError for a checkpoint that is quantized already, and CheckpointError as the loader does."""

    def __init__(self, model_dir: Path, spec: ModelSpec) -> None:
        self.spec, self.config = spec, read_config(model_dir)
        if self.config.get("quantization_config"):
            method = self.config["quantization_config"].get("quant_method")
            raise ConfigError(f"{model_dir} is quantized already ({method}): expected a plain checkpoint")
        self._family = FAMILIES[spec.family]
        self._table = check_table(read_table(model_dir), None, spec, self._family)
        self._reader = WeightReader(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(math.prod(shape) * self.dtype(role).itemsize for role, shape in self._table.shapes.items())

    def roles(self) -> Iterator[TensorRole]:
        """Every weight in order: embedding, layer by layer, final norm, LM head (a tied one not)."""
        yield TensorRole("embed")
        for layer, layer_spec in enumerate(self.spec.layers):
            for role in self._table.shapes:
                if role.layer == layer and role.owner == "attention":
                    yield role
            for expert in range(layer_spec.ffn.experts.total):
                yield from (TensorRole(part, layer, expert) for part in EXPERT_PARTS)
        yield TensorRole("final_norm")
        if not self.spec.tied_embeddings:
            yield TensorRole("lm_head")

    def name(self, role: TensorRole) -> str:
        """Its checkpoint name, or where it is part of a fused tensor the one it would have apart."""
        weight = self._table.weights.get(role)
        return weight.name if weight else name_of(role, self.spec, self._family)

    def dtype(self, role: TensorRole) -> torch.dtype:
        """What it is stored in."""
        stored = self._table.weights[self._stored(role)].plain.dtype
        return getattr(torch, FLOAT_DTYPES[stored])

    def shape(self, role: TensorRole) -> tuple[int, ...]:
        """Its shape, experts apart."""
        shape = self._table.shapes[self._stored(role)]
        if len(shape) < 3:
            return shape
        return (shape[1] // (1 if role.part == "down" else 2), shape[2])

    def read(self, role: TensorRole) -> Tensor:
        """The numbers, as they are mapped."""
        stored = self._stored(role)
        weight = self._reader.plain(stored, role.expert)
        if stored == role or role.part == "down":
            return weight
        return weight.chunk(2)[EXPERT_PARTS.index(role.part)]

    def _stored(self, role: TensorRole) -> TensorRole:
        """The role of the tensor that holds it."""
        if role.part not in EXPERT_PARTS or role in self._table.weights:
            return role
        return TensorRole("all_down" if role.part == "down" else "all_gate_up", role.layer)
