"""A checkpoint's tensors put together to weights: plain ones of one tensor, quantized ones of several."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.models.tensor_table import FLOAT_DTYPES, StoredTensor
from moe_runtime.quant.checkpoints.scheme import Quantization, Scheme
from moe_runtime.quant.formats import FORMATS, Format, format_named, plain_format

_PLAIN = ".weight"


@dataclass(frozen=True)
class StoredWeight:
    """One weight: its tensors by suffix, or under "" the tensor itself where it is plain.

    `name` is what the tensor of a plain weight would be called; `scheme` says how a quantized one is stored.
    """

    name: str
    parts: Mapping[str, StoredTensor]
    scheme: Scheme | None = None

    @property
    def plain(self) -> StoredTensor:
        assert self.scheme is None
        return self.parts[""]

    @property
    def format(self) -> Format | None:
        """The format that it is read as, None for a plain one."""
        if self.scheme is None:
            return None
        return self.scheme.stored_format({suffix: part.dtype for suffix, part in self.parts.items()})

    @property
    def some_name(self) -> str:
        """A tensor that really is in the checkpoint."""
        return next(iter(self.parts.values())).name


def assemble(table: Mapping[str, StoredTensor], quantization: Quantization | None) -> list[StoredWeight]:
    """Every tensor as a weight or as a part of one; whether they are what they should be, table_check tells.

    Raises CheckpointError for a quantized weight of a module that the configuration leaves plain.
    """
    if quantization is None:
        return [StoredWeight(name, {"": tensor}) for name, tensor in table.items()]
    suffixes = {suffix for scheme in quantization.schemes for suffix in scheme.suffixes}
    suffixes.update(quantization.unused)
    modules: dict[str, dict[str, StoredTensor]] = {}
    weights = []
    for name, tensor in table.items():
        suffix = max((suffix for suffix in suffixes if name.endswith(suffix)), key=len, default="")
        if suffix:
            modules.setdefault(name.removesuffix(suffix), {})[suffix] = tensor
        else:
            weights.append(StoredWeight(name, {"": tensor}))
    for module, parts in modules.items():
        weights += _module_weights(module, parts, quantization)
    return weights


def _module_weights(module: str, parts: dict[str, StoredTensor], quantization: Quantization) -> Iterable[StoredWeight]:
    telling = {suffix: part for suffix, part in parts.items() if suffix not in quantization.unused}
    plain = telling.keys() == {_PLAIN} and telling[_PLAIN].dtype in FLOAT_DTYPES
    if plain or not telling:
        return [StoredWeight(part.name, {"": part}) for part in parts.values()]
    scheme = quantization.scheme_of(module)
    if scheme is None:
        raise CheckpointError(
            f"tensor {next(iter(telling.values())).name} is of a quantized weight, but config.json's "
            f"quantization_config leaves {module} plain"
        )
    return [StoredWeight(module if scheme.fused else module + _PLAIN, telling, scheme)]


def joined_format(
    weights: Sequence[StoredWeight], rows: Sequence[int], quant: str | None, key: str, dtype: torch.dtype
) -> Format:
    """The format in which weights are read as one: as they are stored where `quant` is null, and plain ones as it says.

    rows: how many of each; blocks of rows that would straddle two weights become a scale for each row. `key`: where
    the configuration says `quant`. Int8 weights are the same with and without quantized activations. Raises ConfigError
    for an unknown format, and CheckpointError where weights are not stored alike or would have to change their format.
    """
    asked, stored = None if quant is None else format_named(quant, key), weights[0].format
    for weight in weights[1:]:
        if weight.format != stored:
            raise CheckpointError(
                f"tensor {weights[0].some_name} is stored as {_told(stored)} and {weight.some_name} as "
                f"{_told(weight.format)}: expected the same of weights that are joined"
            )
    if stored is None:
        return asked or plain_format(dtype)
    if (
        asked is not None
        and replace(asked, name=stored.name, scales=stored.scales, activations=stored.activations) != stored
    ):
        found = f"tensor {weights[0].some_name} is stored as {stored.name}"
        raise CheckpointError(f"{found}, but {key} is {quant}: expected null or {stored.name}")
    if any(count % stored.group[0] for count in rows[:-1]):
        return FORMATS["fp8-g128"]
    return stored if asked is None else replace(stored, name=asked.name, activations=asked.activations)


def _told(form: Format | None) -> str:
    return "plain numbers" if form is None else form.name
