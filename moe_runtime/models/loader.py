"""Reads from a checkpoint what a role owns, after checking the whole tensor table against the spec.

Legend: V vocabulary, H hidden, Q = heads * D, P = (heads + 2 * kv_heads) * D, I intermediate, E experts.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.models.registry import FAMILIES
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.table_check import check_table
from moe_runtime.models.tensor_table import StoredTensor, open_tensors, read_table
from moe_runtime.models.weight_roles import TensorRole
from moe_runtime.models.weights import AttentionLayerWeights, AttentionWeights, ExpertWeights

Progress = Callable[[float, str], None]


class Checkpoint:
    """A checked checkpoint with its files mapped; every tensor handed out is a copy that outlives the files."""

    def __init__(
        self, spec: ModelSpec, tensors: dict[TensorRole, StoredTensor], transposed: frozenset[TensorRole]
    ) -> None:
        self.spec = spec
        self._tensors = tensors
        self._transposed = transposed
        self._handles = {file: open_tensors(file) for file in {tensor.file for tensor in tensors.values()}}

    def attention_weights(self, dtype: torch.dtype, progress: Progress) -> AttentionWeights:
        """All that an attention node owns, in `dtype` but for the gates, which stay float32.

        `progress` is called with the fraction done and what was read. Raises CheckpointError when embeddings are tied
        and the checkpoint has an LM head of its own that differs from them.
        """
        embed_VH = self._read(TensorRole("embed"), dtype)
        progress(0.0, "embedding")
        layers = []
        for layer in range(len(self.spec.layers)):
            layers.append(self._attention_layer(layer, dtype))
            progress((layer + 1) / len(self.spec.layers), f"attention of layer {layer}")
        return AttentionWeights(
            embed_VH=embed_VH,
            layers=tuple(layers),
            final_norm_H=self._read(TensorRole("final_norm"), dtype),
            lm_head_VH=self._lm_head(embed_VH, dtype),
        )

    def expert(self, layer: int, expert: int, dtype: torch.dtype) -> ExpertWeights:
        """One logical expert of a layer (routed ones first, then the one that every token picks), in `dtype`."""
        rows = self.spec.layers[layer].ffn.intermediate_of(expert)
        gate_up_2IH = torch.empty(2 * rows, self.spec.hidden, dtype=dtype)
        down_HI = torch.empty(self.spec.hidden, rows, dtype=dtype)
        self.read_expert(layer, expert, gate_up_2IH, down_HI)
        return ExpertWeights(gate_up_2IH, down_HI)

    def read_expert(self, layer: int, expert: int, gate_up_2IH: Tensor, down_HI: Tensor) -> None:
        """Read one logical expert straight into the given tensors (a bank's slot), converting to their dtype.

        Only this expert's bytes are read, from a fused tensor too.
        """
        if TensorRole("down", layer, expert) in self._tensors:
            rows = len(gate_up_2IH) // 2
            gate_up_2IH[:rows].copy_(self._stored(TensorRole("gate", layer, expert)))
            gate_up_2IH[rows:].copy_(self._stored(TensorRole("up", layer, expert)))
            down_HI.copy_(self._stored(TensorRole("down", layer, expert)))
        else:
            gate_up_2IH.copy_(self._fused_slice(TensorRole("all_gate_up", layer), expert))
            down_HI.copy_(self._fused_slice(TensorRole("all_down", layer), expert))

    def _attention_layer(self, layer: int, dtype: torch.dtype) -> AttentionLayerWeights:
        def read(part: str, dtype: torch.dtype = dtype) -> Tensor:
            return self._read(TensorRole(part, layer), dtype)

        spec, ffn = self.spec, self.spec.layers[layer].ffn
        return AttentionLayerWeights(
            input_norm_H=read("input_norm"),
            qkv_PH=torch.cat([read(part) for part in "qkv"]),
            o_HQ=read("o"),
            post_norm_H=read("post_norm"),
            qkv_bias_P=torch.cat([read(f"{part}_bias") for part in "qkv"]) if spec.qkv_bias else None,
            o_bias_H=read("o_bias") if spec.o_bias else None,
            q_norm=read("q_norm") if spec.qk_norm != "none" else None,
            k_norm=read("k_norm") if spec.qk_norm != "none" else None,
            router_EH=read("router", torch.float32) if ffn.routed else None,
            shared_gate_1H=read("shared_gate", torch.float32) if ffn.shared_gate else None,
        )

    def _lm_head(self, embed_VH: Tensor, dtype: torch.dtype) -> Tensor:
        head, embed = TensorRole("lm_head"), TensorRole("embed")
        if not self.spec.tied_embeddings:
            return self._read(head, dtype)
        if head in self._tensors and not torch.equal(self._stored(head), self._stored(embed)):
            raise CheckpointError(
                f"tensor {self._tensors[head].name} differs from {self._tensors[embed].name}, but config.json says "
                "tie_word_embeddings: true"
            )
        return embed_VH

    def _read(self, role: TensorRole, dtype: torch.dtype) -> Tensor:
        return self._stored(role).to(dtype, copy=True)

    def _stored(self, role: TensorRole) -> Tensor:
        tensor = self._tensors[role]
        return self._handles[tensor.file].get_tensor(tensor.name)

    def _fused_slice(self, role: TensorRole, expert: int) -> Tensor:
        tensor = self._tensors[role]
        matrix: Tensor = self._handles[tensor.file].get_slice(tensor.name)[expert]
        return matrix.T if role in self._transposed else matrix


def open_checkpoint(model_dir: Path, spec: ModelSpec) -> Checkpoint:
    """Check a checkpoint's headers against the spec and map its files; no weights are read yet.

    Raises CheckpointError that names the tensor (missing, left over, wrong shape or dtype) or the file (truncated).
    """
    tensors, transposed = check_table(read_table(model_dir), spec, FAMILIES[spec.family])
    return Checkpoint(spec, tensors, transposed)


def fingerprint(model_dir: Path) -> int:
    """A 63-bit hash of config.json and of the tensor table (names, shapes, dtypes, files and their sizes)."""
    digest = hashlib.blake2b((model_dir / "config.json").read_bytes(), digest_size=8)
    table = read_table(model_dir)
    for name in sorted(table):
        tensor = table[name]
        digest.update(f"{name} {tensor.shape} {tensor.dtype} {tensor.file.name}\n".encode())
    for file in sorted({tensor.file for tensor in table.values()}):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return int.from_bytes(digest.digest(), "big") >> 1
