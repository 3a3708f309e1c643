"""Writing safetensors files tensor by tensor, in any order: memory holds one tensor, and a full disk tells at once."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from moe_runtime.models.tensor_table import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 1_900_000_000
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    file: int  # its descriptor
    shard: str
    offset: int


class ShardWriter:
    """Writes the planned tensors to model.safetensors, or to shards below `limit` bytes and their index.

    Entered, the files take their full size on disk; left without an error, they are complete and synced. Raises OSError
    as the system does (a full disk, above all).
    """

    def __init__(self, folder: Path, plans: Mapping[str, TensorPlan], limit: int = SHARD_BYTES) -> None:
        self._folder, self._plans = folder, plans
        self._shards = list(_dealt(plans, limit))
        self._places: dict[str, _Place] = {}
        self._files: list[int] = []
        self._left = set(plans)

    def __enter__(self) -> "ShardWriter":
        try:
            for number, names in enumerate(self._shards, start=1):
                self._open(_shard_name(number, len(self._shards)), names)
        except OSError:
            self._close()
            raise
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one planned tensor, once."""
        plan, place = self._plans[name], self._places[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (plan.dtype, plan.shape), name
        self._left.remove(name)
        _write_all(place.file, tensor.contiguous().flatten().view(torch.uint8).numpy().data, place.offset)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._left, f"{min(self._left)} was not written"
                for file in self._files:
                    os.fsync(file)
                if len(self._shards) > 1:
                    self._write_index()
        finally:
            self._close()

    def _open(self, shard: str, names: list[str]) -> None:
        """Lay one file out as the safetensors library does: larger numbers first, so that all of them are aligned."""
        ordered = sorted(names, key=lambda name: (-self._plans[name].dtype.itemsize, name))
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends = list(accumulate((self._plans[name].nbytes for name in ordered), initial=0))
        for name, *span in zip(ordered, ends, ends[1:], strict=False):
            plan = self._plans[name]
            entries[name] = {"dtype": _DTYPES[plan.dtype], "shape": list(plan.shape), "data_offsets": span}
        header = json.dumps(entries).encode()
        header = header.ljust(-(-len(header) // 8) * 8)
        start = 8 + len(header)
        file = os.open(self._folder / shard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._files.append(file)
        os.posix_fallocate(file, 0, start + ends[-1])
        _write_all(file, memoryview(len(header).to_bytes(8, "little") + header), 0)
        self._places |= {name: _Place(file, shard, start + at) for name, at in zip(ordered, ends, strict=False)}

    def _write_index(self) -> None:
        total = sum(plan.nbytes for plan in self._plans.values())
        shard_of = {name: self._places[name].shard for name in self._plans}
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def _dealt(plans: Mapping[str, TensorPlan], limit: int) -> Iterator[list[str]]:
    """Names by shard, in order; a tensor above the limit has a shard of its own."""
    shard: list[str] = []
    size = 0
    for name, plan in plans.items():
        if shard and size + plan.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += plan.nbytes
    yield shard


def _shard_name(number: int, total: int) -> str:
    return SINGLE_FILE if total == 1 else f"model-{number:05}-of-{total:05}.safetensors"


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
