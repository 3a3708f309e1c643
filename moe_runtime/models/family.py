"""What one file a family provides: how to read its config, and what its FFN tensors are called in a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_runtime.models.spec import ModelSpec

HfConfig = Any  # a transformers config object; transformers is imported by the registry only

# Names below an FFN's prefix, with * for an expert's number, and the part each one is; "all_" parts hold all experts.
FUSED_EXPERTS = {"experts.gate_up_proj": "all_gate_up", "experts.down_proj": "all_down"}
DENSE_FFN = {"gate_proj.weight": "gate", "up_proj.weight": "up", "down_proj.weight": "down"}
PROJ_EXPERTS = {f"experts.*.{name}": part for name, part in DENSE_FFN.items()}
W123_EXPERTS = {"experts.*.w1.weight": "gate", "experts.*.w3.weight": "up", "experts.*.w2.weight": "down"}


@dataclass(frozen=True)
class Family:
    """A model family: `to_spec` reads its config; the tables name its FFN tensors below `model.layers.N.<prefix>.`.

    Where a part has several names, any one of them may be in a checkpoint, and messages use the first.
    """

    to_spec: Callable[[HfConfig], ModelSpec]
    prefixes: tuple[str, ...]
    moe_tensors: Mapping[str, str]
    dense_tensors: Mapping[str, str] = field(default_factory=dict)
