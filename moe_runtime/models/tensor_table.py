"""The tensors of a safetensors checkpoint as its headers tell: name, file, shape and dtype, without reading data."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# safetensors' names of what can be loaded, and torch's.
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's header entry: its file, its shape, and its dtype in safetensors' spelling."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_table(model_dir: Path) -> dict[str, StoredTensor]:
    """All tensors by name, from model.safetensors or from the shards that model.safetensors.index.json lists.

    Raises CheckpointError naming the file (missing, truncated, corrupt) or the tensor (in the wrong shard, in none,
    in two, or in a shard but not in the index).
    """
    if (model_dir / SINGLE_FILE).exists():
        return {tensor.name: tensor for tensor in read_header(model_dir / SINGLE_FILE)}
    shard_of = _read_index(model_dir / INDEX_FILE)
    table: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        for tensor in read_header(model_dir / shard):
            if shard_of.get(tensor.name) != shard:
                raise CheckpointError(
                    f"tensor {tensor.name} is in {shard}, but {INDEX_FILE} says {shard_of.get(tensor.name)}"
                )
            table[tensor.name] = tensor
    for name, shard in shard_of.items():
        if name not in table:
            raise CheckpointError(f"tensor {name} is not in {shard}, where {INDEX_FILE} says it is")
    return table


def weight_files(model_dir: Path) -> list[Path]:
    """The files that a checkpoint's weights should be in, whether or not they exist."""
    if (model_dir / INDEX_FILE).exists() and not (model_dir / SINGLE_FILE).exists():
        return [model_dir / shard for shard in sorted(set(_read_index(model_dir / INDEX_FILE).values()))]
    return [model_dir / SINGLE_FILE]


def read_header(file: Path) -> list[StoredTensor]:
    """The header of one safetensors file, which also proves that the file has its full length."""
    handle = open_tensors(file)
    entries = []
    for name in handle.keys():  # noqa: SIM118 (no mapping, it only has keys())
        view = handle.get_slice(name)
        entries.append(StoredTensor(name, file, tuple(view.get_shape()), view.get_dtype()))
    return entries


def open_tensors(file: Path) -> Any:
    """A safe_open handle over the memory-mapped file; raises CheckpointError with the file's name."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or corrupt: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        shard_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds neither {SINGLE_FILE} nor {INDEX_FILE}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is corrupt: {error!r}") from error
    if not isinstance(shard_of, dict) or not all(_is_plain_name(shard) for shard in shard_of.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names in the same directory")
    return shard_of


def _is_plain_name(shard: object) -> bool:
    return isinstance(shard, str) and Path(shard).name == shard
