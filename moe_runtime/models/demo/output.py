"""Writing a finished Hugging Face directory: all of it or nothing, in shards with an index, and marked as ours."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MARKER_NAME = "demo_model.json"


def write_finished(out: Path, marker: Mapping[str, Any], fill: Callable[[Path, Path], None]) -> bool:
    """Lets `fill(model_dir, scratch_dir)` write a model beside `out`, then renames it to `out`.

    `marker` says what the directory holds: one with an equal marker is left alone (the answer is False), one with
    another marker is replaced. Raises ValueError where `out` holds anything that this function did not write.
    """
    marker = json.loads(json.dumps(marker))
    if _is_finished(out, marker):
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        model_dir = Path(scratch, "model")
        model_dir.mkdir()
        fill(model_dir, Path(scratch))
        write_json(model_dir / MARKER_NAME, marker)
        for file in model_dir.iterdir():  # safetensors makes files for their owner only
            shutil.copymode(model_dir / MARKER_NAME, file)
        if _is_finished(out, marker):  # another process was faster
            return False
        if out.exists():
            os.rename(out, Path(scratch, "replaced"))
        os.rename(model_dir, out)
    return True


def _is_finished(out: Path, marker: Mapping[str, Any]) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    marker_file = out / MARKER_NAME
    if not marker_file.is_file():
        raise ValueError(
            f"{out}: expected nothing, an empty folder or a demo model, found something else; left it alone"
        )
    return bool(json.loads(marker_file.read_text(encoding="utf-8")) == marker)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` as indented UTF-8 JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ShardedWriter:
    """Writes safetensors shards one at a time, so that memory holds one of them, and an index at the end."""

    def __init__(self, folder: Path, num_shards: int) -> None:
        self._folder, self._num_shards = folder, num_shards
        self._shard_of: dict[str, str] = {}
        self._shards_written = self._total_bytes = 0

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the next shard."""
        self._shards_written += 1
        name = f"model-{self._shards_written:05}-of-{self._num_shards:05}.safetensors"
        save_file(dict(tensors), self._folder / name, metadata={"format": "pt"})
        self._shard_of |= dict.fromkeys(tensors, name)
        self._total_bytes += sum(x.nbytes for x in tensors.values())

    def finish(self) -> None:
        """Writes model.safetensors.index.json, once all shards are there."""
        assert self._shards_written == self._num_shards, f"{self._shards_written} of {self._num_shards} shards written"
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(self._shard_of.items()))}
        write_json(self._folder / "model.safetensors.index.json", index)
