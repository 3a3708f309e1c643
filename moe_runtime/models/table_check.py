"""Compares a checkpoint's tensor table with what a spec needs: every tensor used once, none missing, none wrong."""

from collections.abc import Mapping, Sequence

from moe_runtime.errors import CheckpointError
from moe_runtime.models.family import Family
from moe_runtime.models.spec import ModelSpec
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

Shapes = dict[TensorRole, tuple[int, ...]]


def check_table(
    table: Mapping[str, StoredTensor], spec: ModelSpec, family: Family
) -> tuple[dict[TensorRole, StoredTensor], frozenset[TensorRole]]:
    """Assign each tensor its role: (tensors by role, fused ones stored with their two matrix axes swapped).

    An LM head beside tied embeddings is allowed (the loader compares the two). Raises CheckpointError otherwise.
    """
    tensors, left_over = _assign(table, spec, family)
    needed = _needed(tensors, spec, family)
    optional: Shapes = {TensorRole("lm_head"): (spec.vocab, spec.hidden)} if spec.tied_embeddings else {}
    left_over += [tensor for role, tensor in tensors.items() if role not in needed and role not in optional]
    _refuse_missing([role for role in needed if role not in tensors], left_over, spec, family)
    _refuse_left_over(left_over, spec)
    shapes = needed | {role: shape for role, shape in optional.items() if role in tensors}
    transposed = _transposed(tensors, shapes)
    for role in shapes:
        _check(tensors[role], _swap(shapes[role]) if role in transposed else shapes[role])
    return tensors, transposed


def _refuse_missing(missing: list[TensorRole], left_over: list[StoredTensor], spec: ModelSpec, family: Family) -> None:
    if missing:
        hint = f" (left over: {left_over[0].name})" if left_over else ""
        raise CheckpointError(f"tensor {name_of(missing[0], spec, family)} is missing{_more(missing)}{hint}")


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
    table: Mapping[str, StoredTensor], spec: ModelSpec, family: Family
) -> tuple[dict[TensorRole, StoredTensor], list[StoredTensor]]:
    tensors: dict[TensorRole, StoredTensor] = {}
    left_over = []
    for name, tensor in table.items():
        role = role_of(name, spec, family)
        if role is None:
            left_over += [] if is_ignored(name) else [tensor]
        elif role in tensors:
            raise CheckpointError(f"tensors {tensors[role].name} and {name} are two names of one tensor")
        else:
            tensors[role] = tensor
    return tensors, left_over


def _needed(tensors: Mapping[TensorRole, StoredTensor], spec: ModelSpec, family: Family) -> Shapes:
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


def _is_fused(tensors: Mapping[TensorRole, StoredTensor], layer: int, family: Family) -> bool:
    if any(TensorRole(part, layer) in tensors for part in ("all_gate_up", "all_down")):
        return True
    expert_parts = [part for name, part in family.moe_tensors.items() if "*" in name or part.startswith("all_")]
    some_apart = any(TensorRole(part, layer, 0) in tensors for part in ("gate", "up", "down"))
    return expert_parts[0].startswith("all_") and not some_apart


def _transposed(tensors: Mapping[TensorRole, StoredTensor], shapes: Shapes) -> frozenset[TensorRole]:
    """The fused tensors whose matrices are stored input-first.

    A shape that reads both ways (2I = H or I = H, never both) follows the layer's other tensor.
    """
    swapped = set()
    for layer in {role.layer for role in shapes if role.part == "all_down"}:
        pair = [TensorRole("all_gate_up", layer), TensorRole("all_down", layer)]
        square = [role for role in pair if shapes[role] == _swap(shapes[role])]
        input_first = [role for role in pair if role not in square and tensors[role].shape == _swap(shapes[role])]
        swapped.update(input_first + square if input_first else [])
    return frozenset(swapped)


def _swap(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"tensor {tensor.name} in {tensor.file.name} has shape {list(tensor.shape)}: expected {list(shape)}"
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"tensor {tensor.name} in {tensor.file.name} has dtype {tensor.dtype}: expected {', '.join(FLOAT_DTYPES)}"
        )
