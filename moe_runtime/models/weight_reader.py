"""Reads weights by role from a checkpoint's mapped files."""

from pathlib import Path
from typing import Any

from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.models.table_check import CheckedTable
from moe_runtime.models.tensor_table import StoredTensor, open_tensors
from moe_runtime.models.weight_roles import TensorRole
from moe_runtime.quant.checkpoints.scheme import PartError
from moe_runtime.quant.tensor import QuantizedTensor


class WeightReader:
    """Of fused weights, [experts, rows, columns], it reads one expert's matrix, and only its bytes."""

    def __init__(self, table: CheckedTable) -> None:
        self._table = table
        files = {part.file for weight in table.weights.values() for part in weight.parts.values()}
        self._handles: dict[Path, Any] = {file: open_tensors(file) for file in files}

    def plain(self, role: TensorRole, expert: int = -1) -> Tensor:
        """A plain weight; it may be the mapping itself, so whoever keeps it copies it."""
        stored = self._read(self._table.weights[role].plain, expert if self._fused(role) else -1)
        return stored.T if role in self._table.transposed else stored

    def quantized(self, role: TensorRole, expert: int = -1) -> QuantizedTensor:
        """A quantized matrix, copied. Raises CheckpointError that names the tensor whose content is at fault."""
        weight, (*_, rows, columns) = self._table.weights[role], self._table.shapes[role]
        assert weight.scheme is not None
        index = expert if self._fused(role) else -1
        parts = {suffix: self._read(part, index).clone() for suffix, part in weight.parts.items()}
        try:
            return weight.scheme.unpack(parts, rows, columns)
        except PartError as error:
            part = weight.parts[error.suffix]
            raise CheckpointError(f"tensor {part.name} in {part.file.name} {error}") from error

    def _fused(self, role: TensorRole) -> bool:
        return len(self._table.shapes[role]) == 3

    def _read(self, tensor: StoredTensor, index: int) -> Tensor:
        handle = self._handles[tensor.file]
        return handle.get_tensor(tensor.name) if index < 0 else handle.get_slice(tensor.name)[index]
