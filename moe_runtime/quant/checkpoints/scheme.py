"""The contract of every published way of storing quantized weights.

A *module* is a linear layer by its checkpoint name, without `.weight`; each of its tensors is that name and a suffix.
Which tensors they are, with which shapes and dtypes, and how they become canonical is a Scheme's; which module has
which scheme is the Quantization's, which is read from config.json's quantization_config (see read.py).

Legend: N outputs (rows), K inputs (columns), R x C groups, E experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor

# What scales are stored in, in safetensors' spelling.
SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class PartError(ValueError):
    """The content of one tensor of a quantized weight is wrong; `suffix` says which."""

    def __init__(self, suffix: str, fault: str) -> None:
        super().__init__(fault)
        self.suffix = suffix


@dataclass(frozen=True)
class Part:
    """One tensor of a quantized weight: any of these shapes and any of these dtypes (safetensors' spelling)."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class Scheme(ABC):
    """One way of storing a weight; `layout` is its usual name, `format` what it becomes."""

    layout: str
    format: Format
    scales: str  # the suffix of the scales
    fused: bool = False  # one tensor for all experts of a layer, [E, N, K], instead of a matrix [N, K]

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> Mapping[str, Part]:
        """The tensors of a weight of this shape, by suffix."""

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> QuantizedTensor:
        """One matrix from its tensors (of a fused weight: this expert's), which may become part of it.

        Raises PartError for scales and zero points that cannot be, and for bits where none belong.
        """

    @property
    def suffixes(self) -> frozenset[str]:
        """Those of all tensors that a weight may have."""
        return frozenset(self.parts((1,) * (3 if self.fused else 2)))

    def stored_format(self, dtypes: Mapping[str, str]) -> Format:
        """The format with scales as wide as these tensors have them; `dtypes` by suffix, in safetensors' spelling."""
        return widened(self.format, SCALE_DTYPES.get(dtypes[self.scales], torch.uint8))


def widened(form: Format, scales: torch.dtype) -> Format:
    """The format with float32 scales where its own dtype does not hold these exactly."""
    exact = scales == form.scales or form.scales == torch.float32
    return form if exact else replace(form, scales=torch.float32)


@dataclass(frozen=True)
class Rule:
    """The scheme of all modules that `matches` says yes to; None: they are stored plain."""

    matches: Callable[[str], bool]
    scheme: Scheme | None


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's quantization_config, understood: the first rule that matches a module is the one.

    complete: it names every module that is stored plain, so that any other one without its quantized tensors is a
    fault. unused: suffixes of tensors that a quantized module may have and that computing here has no use for.
    """

    method: str
    rules: tuple[Rule, ...]
    complete: bool
    unused: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme that the configuration has for a module."""
        return next((rule.scheme for rule in self.rules if rule.matches(module)), None)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(rule.scheme for rule in self.rules if rule.scheme)


def left_plain(names: tuple[str, ...]) -> Rule:
    """Modules in a list such as modules_to_not_convert: the named ones, and those below or above by whole segments."""

    def matches(module: str) -> bool:
        return any(f".{name}." in f".{module}." for name in names)

    return Rule(matches, None)


def everything(scheme: Scheme) -> Rule:
    """All modules that no earlier rule has taken."""
    return Rule(lambda module: True, scheme)
