"""How this project's own quantized checkpoints are stored: each format in the compressed-tensors layout made for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_runtime.quant.checkpoints.mxfp4 import PackedE2m1
from moe_runtime.quant.checkpoints.packed_ints import PackedInts
from moe_runtime.quant.checkpoints.plain_numbers import PlainNumbers
from moe_runtime.quant.formats import Format

Written = PackedInts | PlainNumbers | PackedE2m1

_TYPES = {"int8": ("int", 8), "int4": ("int", 4), "e4m3": ("float", 8), "e2m1": ("float", 4)}
_INT8_PER_TOKEN = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class WrittenGroup:
    """Modules that share a format: those that a target matches (compressed-tensors' own spelling)."""

    form: Format
    targets: Sequence[str]


def scheme_for(form: Format) -> Written:
    """The scheme that a format is written in; weights of several matrices joined are written apart."""
    assert form.quantized
    if form.values == "e2m1":
        return PackedE2m1()
    if form.values == "e4m3" or form.activations == "int8":
        layout = "int-quantized" if form.activations == "int8" else "naive-quantized"
        return PlainNumbers(layout, form, group=form.group[1] if form.group == (1, 128) else None)
    return PackedInts(form, form.group[1] or None)


def quantization_config(groups: Mapping[str, WrittenGroup], ignored: Sequence[str]) -> dict[str, Any]:
    """config.json's quantization_config for these groups; `ignored`: modules left plain."""
    layouts = {scheme_for(group.form).layout for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {name: _group(group) for name, group in groups.items()},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(group: WrittenGroup) -> dict[str, Any]:
    form = group.form
    kind, bits = _TYPES[form.values]
    weights: dict[str, Any] = {
        "type": kind,
        "num_bits": bits,
        "symmetric": not form.zero_points,
        "strategy": "channel",
        "dynamic": False,
    }
    if form.group[0] > 1:
        weights |= {"strategy": "block", "block_structure": list(form.group)}
    elif form.group[1]:
        weights |= {"strategy": "group", "group_size": form.group[1]}
    if form.values == "e2m1":
        weights |= {"scale_dtype": "torch.uint8"}
    return {
        "targets": list(group.targets),
        "weights": weights,
        "input_activations": _INT8_PER_TOKEN if form.activations == "int8" else None,
        "output_activations": None,
        "format": scheme_for(form).layout,
    }
