"""quant_method compressed-tensors: groups of modules, each with a layout and what its numbers are.

Dynamic quantization of activations is followed where this runtime has it (int8 with a scale per token, on int8
weights). Elsewhere activations stay in floating point: what a checkpoint says of quantizing them approximates that.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from moe_runtime.quant.checkpoints.fields import Fields
from moe_runtime.quant.checkpoints.mxfp4 import PackedE2m1
from moe_runtime.quant.checkpoints.packed_ints import PackedInts
from moe_runtime.quant.checkpoints.plain_numbers import PlainNumbers
from moe_runtime.quant.checkpoints.scales import int4_format
from moe_runtime.quant.checkpoints.scheme import Quantization, Rule, Scheme
from moe_runtime.quant.formats import FORMATS, Format

_LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mxfp4-pack-quantized")
_OBSERVING = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def read_compressed_tensors(fields: Fields) -> Quantization:
    """The rules of a quantization_config with quant_method compressed-tensors."""
    fields.choose("kv_cache_scheme", (None,), None)
    fields.choose("transform_config", (None, {}), None)
    fields.choose("moe_sparsity_config", (None,), None)
    # frozen: what early versions wrote of checkpoints that are compressed all the same.
    fields.choose("quantization_status", ("compressed", "frozen"), "compressed")
    _refuse_sparse(fields)
    layout = fields.take("format", None)
    ignored = fields.names("ignore")
    rules = [(0, Rule(_matcher(name), None)) for name in ignored]
    unused: tuple[str, ...] = ()
    for group in fields.objects("config_groups").values():
        scheme, static = _read_group(group, layout)
        rules += [(_precedence(target), Rule(_target(group, target), scheme)) for target in _targets(group)]
        unused = (".input_scale",) if static else unused
        group.finish()
    fields.ignore(("version", "global_compression_ratio"))
    fields.finish()
    # A module's own name goes before a pattern, and that before the class of modules.
    ordered = tuple(rule for _, rule in sorted(rules, key=lambda pair: pair[0]))
    return Quantization("compressed-tensors", ordered, complete=True, unused=unused)


def _refuse_sparse(fields: Fields) -> None:
    sparsity = fields.take("sparsity_config", None)
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise fields.refuse("sparsity_config", sparsity, "none, or format dense")


def _targets(group: Fields) -> tuple[str, ...]:
    targets = group.names("targets")
    if not targets:
        raise group.refuse("targets", targets, "Linear, module names, or patterns (re:)")
    return targets


def _target(group: Fields, target: str) -> Callable[[str], bool]:
    if target == "Linear":
        return lambda module: True
    if not target.startswith("re:") and "." not in target and target != "lm_head":
        raise group.refuse("targets", target, "Linear, module names, or patterns (re:)")
    return _matcher(target)


def _precedence(target: str) -> int:
    return 3 if target == "Linear" else 2 if target.startswith("re:") else 1


def _matcher(name: str) -> Callable[[str], bool]:
    if not name.startswith("re:"):
        return lambda module: module == name
    pattern = re.compile(name.removeprefix("re:"))
    return lambda module: pattern.match(module) is not None


def _read_group(group: Fields, layout: str | None) -> tuple[Scheme, bool]:
    """The scheme of one group, and whether static activation scales lie beside its weights."""
    own = group.take("format", None)
    if own is not None or layout is None:
        layout = own
    if layout not in _LAYOUTS:
        raise group.refuse("format", layout, ", ".join(_LAYOUTS))
    group.choose("output_activations", (None,), None)
    weights = Fields(f"{group.place}.weights", group.take("weights"))
    activations, static = _read_activations(group)
    kind, bits = weights.choose("type", ("int", "float"), "int"), weights.choose("num_bits", (4, 8), 8)
    weights.choose("dynamic", (False,), False)
    # `weight` is an order while quantizing only; `group` would store inputs out of order.
    weights.choose("actorder", (None, False, "weight", "static"), None)
    weights.ignore(_OBSERVING)
    size, block = (
        weights.take("group_size", None),
        weights.choose("block_structure", (None, [128, 128], "128x128"), None),
    )
    strategy = weights.take("strategy", None) or _strategy_of(size)
    symmetric = weights.choose("symmetric", (True, False), True)
    weights.finish()
    columns = size if strategy == "group" else None
    scheme = _scheme(layout, f"{kind}{bits}", strategy, columns, block is not None, symmetric, activations)
    if scheme is None:
        found = f"{layout} of {kind}{bits}, strategy {strategy}, group {columns}, symmetric {symmetric}"
        raise group.refuse("weights", found + (f", {activations} activations" if activations else ""), _SUPPORTED)
    if static and kind != "float":
        raise group.refuse("input_activations.dynamic", False, "true")
    return scheme, static


_SUPPORTED = (
    "int4 pack-quantized in groups that are multiples of 32, or per channel; int8 per channel or tensor, symmetric, "
    "with no activations or int8 ones; float8 per channel, tensor, 128 columns or block of 128 x 128; "
    "float4 mxfp4-pack-quantized in groups of 32"
)


def _strategy_of(size: int | None) -> str:
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _read_activations(group: Fields) -> tuple[str | None, bool]:
    """(None, `int8` or `float`; whether their scale is stored): how the checkpoint wants them quantized."""
    tree = group.take("input_activations", None)
    if tree is None:
        return None, False
    fields = Fields(f"{group.place}.input_activations", tree)
    kind, bits = fields.choose("type", ("int", "float"), "int"), fields.choose("num_bits", (4, 8), 8)
    dynamic = fields.choose("dynamic", (True, False), False)
    strategy = fields.choose("strategy", ("token", "tensor", "group"), "token" if dynamic else "tensor")
    symmetric = fields.choose("symmetric", (True, False), True)
    fields.ignore((*_OBSERVING, "group_size", "block_structure", "actorder"))
    fields.finish()
    if kind == "float":
        return "float", not dynamic
    if not dynamic or strategy != "token" or not symmetric or bits != 8:
        raise group.refuse("input_activations", tree, "8 bits, symmetric, dynamic, strategy token")
    return "int8", False


def _scheme(
    layout: str, numbers: str, strategy: str, size: Any, block: bool, symmetric: bool, activations: str | None
) -> Scheme | None:
    whole = strategy in ("channel", "tensor")
    match layout, numbers:
        case "pack-quantized", "int4" if strategy in ("group", "channel"):
            form = int4_format(size, not symmetric) if size is None or (isinstance(size, int) and size > 0) else None
            return PackedInts(form, size) if form else None
        case "pack-quantized", "int8" if whole and symmetric and activations != "float":
            return PackedInts(_int8(activations), None)
        case "int-quantized" | "naive-quantized", "int8" if whole and symmetric and activations != "float":
            return PlainNumbers(layout, _int8(activations), per_tensor=strategy == "tensor")
        case "float-quantized" | "naive-quantized", "float8" if symmetric:
            return _float8(layout, strategy, size, block)
        case "mxfp4-pack-quantized", "float4" if strategy == "group" and size == 32 and symmetric:
            return PackedE2m1()
    return None


def _int8(activations: str | None) -> Format:
    return FORMATS["w8a8" if activations == "int8" else "w8a16"]


def _float8(layout: str, strategy: str, size: Any, block: bool) -> Scheme | None:
    match strategy:
        case "channel" | "tensor":
            return PlainNumbers(layout, FORMATS["fp8"], per_tensor=strategy == "tensor")
        case "block" if block:
            return PlainNumbers(layout, FORMATS["fp8-block"])
        case "group" if isinstance(size, int) and size > 0 and size % 128 == 0:
            return PlainNumbers(layout, FORMATS["fp8-g128"], group=size)
    return None
