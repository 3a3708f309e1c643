"""Compares a checkpoint's weights with what a spec needs: every tensor used once, none missing, none wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_runtime.errors import CheckpointError
from moe_runtime.models.family import Family
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.stored_weights import StoredWeight, assemble
from moe_runtime.models.tensor_table import FLOAT_DTYPES, StoredTensor
from moe_runtime.models.weight_roles import (
    TensorRole,
    attention_shapes,
    expert_shapes,
    fused_shapes,
    is_ignored,
    name_of,
    role_of,
)
from moe_runtime.quant.checkpoints.scheme import Part, Quantization

Shapes = dict[TensorRole, tuple[int, ...]]
Weights = dict[TensorRole, StoredWeight]

# What a quantization_config is about. Routers, which some hold for linear layers and others not, may be either.
_LINEARS = frozenset({"q", "k", "v", "o", "gate", "up", "down", "lm_head"})
_MAY_BE_QUANTIZED = _LINEARS | {"all_gate_up", "all_down", "router", "shared_gate"}


@dataclass(frozen=True)
class CheckedTable:
    """Every weight by role, with its shape; `transposed`: fused plain ones stored with their matrix axes swapped."""

    weights: Weights
    shapes: Shapes
    transposed: frozenset[TensorRole]


def check_table(
    table: Mapping[str, StoredTensor], quantization: Quantization | None, spec: ModelSpec, family: Family
) -> CheckedTable:
    """Assign each tensor its role.

    An LM head beside tied embeddings is allowed (the loader compares the two). Raises CheckpointError otherwise.
    """
    weights, left_over = _assign(table, quantization, spec, family)
    needed = _needed(weights, spec, family)
    optional: Shapes = {TensorRole("lm_head"): (spec.vocab, spec.hidden)} if spec.tied_embeddings else {}
    for role, weight in weights.items():
        if role not in needed and role not in optional:
            left_over += weight.parts.values()
    missing = [name_of(role, spec, family) for role in needed if role not in weights]
    _refuse_missing(missing, left_over, quantization)
    _refuse_left_over(left_over, spec)
    shapes = needed | {role: shape for role, shape in optional.items() if role in weights}
    transposed = _transposed(weights, shapes)
    for role in shapes:
        _check(role, weights[role], _swap(shapes[role]) if role in transposed else shapes[role], quantization)
    return CheckedTable(weights, shapes, transposed)


def _refuse_missing(missing: list[str], left_over: list[StoredTensor], quantization: Quantization | None) -> None:
    if missing:
        hint = f" (left over: {left_over[0].name})" if left_over else ""
        name = _name_in(quantization, missing[0])
        raise CheckpointError(f"tensor {name} is missing{_more(missing)}{hint}")


def _name_in(quantization: Quantization | None, name: str) -> str:
    """What the first tensor of a weight is called, given what it would be called if it were plain."""
    module = name.removesuffix(".weight")
    scheme = quantization.scheme_of(module) if quantization and quantization.complete else None
    return name if scheme is None else module + min(scheme.suffixes)


def _refuse_left_over(left_over: list[StoredTensor], spec: ModelSpec) -> None:
    if left_over:
        tensor = left_over[0]
        raise CheckpointError(
            f"tensor {tensor.name} {list(tensor.shape)} in {tensor.file.name} is left over{_more(left_over)}: "
            f"a {spec.family} of this config has no use for it"
        )


def _more(items: Sequence[object]) -> str:
    return f", and {len(items) - 1} more" if len(items) > 1 else ""


def _assign(
    table: Mapping[str, StoredTensor], quantization: Quantization | None, spec: ModelSpec, family: Family
) -> tuple[Weights, list[StoredTensor]]:
    weights: Weights = {}
    left_over: list[StoredTensor] = []
    for weight in assemble(table, quantization):
        role = role_of(weight.name, spec, family)
        if role is None:
            left_over += [] if is_ignored(weight.name) else weight.parts.values()
        elif role in weights:
            names = f"{weights[role].some_name} and {weight.some_name}"
            raise CheckpointError(f"tensors {names} are two names of one tensor")
        else:
            weights[role] = weight
    return weights, left_over


def _needed(tensors: Weights, spec: ModelSpec, family: Family) -> Shapes:
    """Every role the spec needs, with its shape; a layer's experts are apart or fused, as the checkpoint has them."""
    needed = attention_shapes(spec)
    for layer, layer_spec in enumerate(spec.layers):
        experts = layer_spec.ffn.experts
        apart = list(range(experts.total))
        if experts.routed and _is_fused(tensors, layer, family):
            needed |= fused_shapes(spec, layer)
            apart = apart[experts.routed :]
        for expert in apart:
            needed |= expert_shapes(spec, layer, expert)
    return needed


def _is_fused(tensors: Weights, layer: int, family: Family) -> bool:
    if any(TensorRole(part, layer) in tensors for part in ("all_gate_up", "all_down")):
        return True
    expert_parts = [part for name, part in family.moe_tensors.items() if "*" in name or part.startswith("all_")]
    some_apart = any(TensorRole(part, layer, 0) in tensors for part in ("gate", "up", "down"))
    return expert_parts[0].startswith("all_") and not some_apart


def _transposed(weights: Weights, shapes: Shapes) -> frozenset[TensorRole]:
    """The fused plain tensors whose matrices are stored input-first.

    A shape that reads both ways (2I = H or I = H, never both) follows the layer's other tensor.
    """
    swapped = set()
    for layer in {role.layer for role in shapes if role.part == "all_down"}:
        pair = [TensorRole(part, layer) for part in ("all_gate_up", "all_down")]
        if any(weights[role].scheme for role in pair):
            continue
        square = [role for role in pair if shapes[role] == _swap(shapes[role])]
        input_first = [role for role in pair if role not in square and weights[role].plain.shape == _swap(shapes[role])]
        swapped.update(input_first + square if input_first else [])
    return frozenset(swapped)


def _swap(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _check(role: TensorRole, weight: StoredWeight, shape: tuple[int, ...], quantization: Quantization | None) -> None:
    if weight.scheme is None:
        _refuse_plain(role, weight, quantization)
        _check_tensor(weight.plain, Part((shape,), tuple(FLOAT_DTYPES)))
        return
    if role.part not in _MAY_BE_QUANTIZED or weight.scheme.fused != (len(shape) == 3):
        raise CheckpointError(
            f"tensor {weight.some_name} is stored as {weight.scheme.layout}: expected plain numbers of {list(shape)}"
        )
    expected = weight.scheme.parts(shape)
    for suffix, part in expected.items():
        if suffix in weight.parts:
            _check_tensor(weight.parts[suffix], part)
        elif not part.optional:
            found = f"{weight.some_name}, stored as {weight.scheme.layout}"
            raise CheckpointError(f"tensor {_module(weight)}{suffix} is missing beside {found}")
    for suffix, tensor in weight.parts.items():
        if suffix not in expected:
            kind = f"{weight.scheme.layout} of {weight.scheme.format.name}"
            raise CheckpointError(f"tensor {tensor.name} is left over: {kind} has no such part")


def _refuse_plain(role: TensorRole, weight: StoredWeight, quantization: Quantization | None) -> None:
    expected = _name_in(quantization, weight.name)
    if role.part in _LINEARS and expected != weight.name:
        fault = "is plain, but config.json's quantization_config has it quantized"
        raise CheckpointError(f"tensor {weight.name} {fault}: expected {expected}")


def _module(weight: StoredWeight) -> str:
    return weight.name.removesuffix(".weight")


def _check_tensor(tensor: StoredTensor, expected: Part) -> None:
    place = f"tensor {tensor.name} in {tensor.file.name}"
    if tensor.shape not in expected.shapes:
        shapes = " or ".join(str(list(shape)) for shape in expected.shapes)
        raise CheckpointError(f"{place} has shape {list(tensor.shape)}: expected {shapes}")
    if tensor.dtype not in expected.dtypes:
        raise CheckpointError(f"{place} has dtype {tensor.dtype}: expected {', '.join(expected.dtypes)}")
