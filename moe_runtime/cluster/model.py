"""The model a launch serves, looked up and checked before any process starts."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_runtime.config import Config
from moe_runtime.errors import ConfigError
from moe_runtime.models.hub import resolve_model
from moe_runtime.models.loader import fingerprint, open_checkpoint
from moe_runtime.models.registry import load_spec
from moe_runtime.models.spec import ModelSpec


@dataclass(frozen=True)
class ResolvedModel:
    """A checkpoint on this machine: its directory (absolute), what it looks like, and the hash all nodes must share."""

    directory: Path
    spec: ModelSpec
    fingerprint: int

    def describe(self) -> str:
        ffn = self.spec.layers[-1].ffn
        shape = f"{self.spec.family}, {len(self.spec.layers)} layers, {ffn.routed} experts, top-{ffn.top_k}"
        return f"model: {self.directory.name} ({shape})"


def resolve(config: Config) -> ResolvedModel:
    """Find and read the configured model. Raises ConfigError or CheckpointError, naming what is wrong."""
    directory = resolve_model(config.model.path)
    spec = load_spec(directory)
    wanted = config.scheduler.max_context
    if wanted is not None and wanted > spec.max_context:
        raise ConfigError(f"scheduler.max_context is {wanted}, but the model's context is {spec.max_context} tokens")
    dtype = getattr(torch, config.model.dtype)
    open_checkpoint(directory, spec).check_formats(dtype, config.model.quant, config.model.attention_quant)
    return ResolvedModel(Path(os.path.abspath(directory)), spec, fingerprint(directory))
