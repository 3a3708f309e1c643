"""Reads from a checkpoint what a role owns, after checking the whole tensor table against the spec.

Legend: V vocabulary, H hidden, Q = heads * D, P = (heads + 2 * kv_heads) * D, I intermediate, E experts.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.bank import Weight
from moe_runtime.models.registry import FAMILIES, read_config
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.stored_weights import joined_format
from moe_runtime.models.table_check import CheckedTable, check_table
from moe_runtime.models.tensor_table import read_table
from moe_runtime.models.weight_reader import WeightReader
from moe_runtime.models.weight_roles import TensorRole
from moe_runtime.models.weights import AttentionLayerWeights, AttentionWeights, ExpertWeights
from moe_runtime.quant.checkpoints.read import read_quantization
from moe_runtime.quant.formats import Format
from moe_runtime.quant.joining import as_format, join_rows
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import dequantize

Progress = Callable[[float, str], None]

_QUANT, _ATTENTION_QUANT = "model.quant", "model.attention_quant"


class Checkpoint:
    """A checked checkpoint with its files mapped; every tensor handed out is a copy that outlives the files.

    `quant` and `attention_quant` below are names of formats: null takes weights as they are stored, otherwise plain
    ones are quantized while they are read, and quantized ones must be stored in that format. Raises CheckpointError
    that names the tensor where they are not, and where what is read cannot be (see quant.checkpoints).
    """

    def __init__(self, spec: ModelSpec, table: CheckedTable) -> None:
        self.spec = spec
        self._weights, self._shapes = table.weights, table.shapes
        self._reader = WeightReader(table)

    def check_formats(self, dtype: torch.dtype, quant: str | None, attention_quant: str | None) -> None:
        """Raise what reading in these formats would raise, as far as it can be told without reading."""
        for layer, layer_spec in enumerate(self.spec.layers):
            for expert in range(layer_spec.ffn.experts.total):
                self.expert_format(layer, expert, dtype, quant)
            for parts in ("qkv", "o"):
                self._linear_format([TensorRole(part, layer) for part in parts], dtype, attention_quant)
        head = TensorRole("embed" if self.spec.tied_embeddings else "lm_head")
        self._linear_format([head], dtype, attention_quant)

    def attention_weights(
        self, dtype: torch.dtype, progress: Progress, attention_quant: str | None = None
    ) -> AttentionWeights:
        """All that an attention node owns: matrices in their format, the rest in `dtype`, gates in float32.

        `progress` is called with the fraction done and what was read. Raises CheckpointError when embeddings are tied
        and the checkpoint has an LM head of its own that differs from them.
        """
        ends = self.attention_ends(dtype, attention_quant)
        progress(0.0, "embedding")
        layers = []
        for layer in range(len(self.spec.layers)):
            layers.append(self.attention_layer(layer, dtype, attention_quant))
            progress((layer + 1) / len(self.spec.layers), f"attention of layer {layer}")
        return replace(ends, layers=tuple(layers))

    def attention_ends(self, dtype: torch.dtype, attention_quant: str | None = None) -> AttentionWeights:
        """What attention_weights has, without the layers."""
        embed_VH = self._read(TensorRole("embed"), dtype)
        return AttentionWeights(
            embed_VH=embed_VH,
            layers=(),
            final_norm_H=self._read(TensorRole("final_norm"), dtype),
            lm_head_VH=self._lm_head(embed_VH, dtype, attention_quant),
        )

    def attention_layer(
        self, layer: int, dtype: torch.dtype, attention_quant: str | None = None
    ) -> AttentionLayerWeights:
        """The attention half of one layer, as attention_weights has it."""

        def read(part: str, dtype: torch.dtype = dtype) -> Tensor:
            return self._read(TensorRole(part, layer), dtype)

        def linear(parts: str) -> Weight:
            return self._linear([TensorRole(part, layer) for part in parts], dtype, attention_quant)

        spec, ffn = self.spec, self.spec.layers[layer].ffn
        return AttentionLayerWeights(
            input_norm_H=read("input_norm"),
            qkv_PH=linear("qkv"),
            o_HQ=linear("o"),
            post_norm_H=read("post_norm"),
            qkv_bias_P=torch.cat([read(f"{part}_bias") for part in "qkv"]) if spec.qkv_bias else None,
            o_bias_H=read("o_bias") if spec.o_bias else None,
            q_norm=read("q_norm") if spec.qk_norm != "none" else None,
            k_norm=read("k_norm") if spec.qk_norm != "none" else None,
            router_EH=read("router", torch.float32) if ffn.routed else None,
            shared_gate_1H=read("shared_gate", torch.float32) if ffn.shared_gate else None,
        )

    def expert_format(self, layer: int, expert: int, dtype: torch.dtype, quant: str | None = None) -> Format:
        """The format of one logical expert: what `expert` gives when asked for it. No weights are read.

        Plain ones are in `dtype`. Scales may be wider than the usual ones of this name, as they are stored.
        """
        roles = self._expert_roles(layer, expert)
        rows = self.spec.layers[layer].ffn.intermediate_of(expert)
        weights = [self._weights[role] for role in roles]
        return joined_format(weights, [rows] * (len(weights) - 1) + [self.spec.hidden], quant, _QUANT, dtype)

    def expert(self, layer: int, expert: int, form: Format) -> ExpertWeights:
        """One logical expert of a layer (routed ones first, then the one that every token picks), in `form`.

        `form` comes from expert_format, or is any format where the expert is stored plain. Only this expert's bytes are
        read, from a fused tensor too.
        """
        *gate_up, down = self._expert_roles(layer, expert)
        return ExpertWeights(self._joined(gate_up, form, expert), self._joined([down], form, expert))

    def _expert_roles(self, layer: int, expert: int) -> list[TensorRole]:
        """Of gate, up and down, or of gate_up and down."""
        if TensorRole("down", layer, expert) in self._weights:
            return [TensorRole(part, layer, expert) for part in ("gate", "up", "down")]
        return [TensorRole("all_gate_up", layer), TensorRole("all_down", layer)]

    def _lm_head(self, embed_VH: Tensor, dtype: torch.dtype, attention_quant: str | None) -> Weight:
        head, embed = TensorRole("lm_head"), TensorRole("embed")
        if not self.spec.tied_embeddings:
            return self._linear([head], dtype, attention_quant)
        stored = self._weights.get(head)
        if stored and (stored.scheme or not torch.equal(self._reader.plain(head), self._reader.plain(embed))):
            raise CheckpointError(
                f"tensor {stored.some_name} differs from {self._weights[embed].name}, but config.json says "
                "tie_word_embeddings: true"
            )
        if attention_quant is None:
            return embed_VH
        return self._linear([embed], dtype, attention_quant)

    def _linear(self, roles: list[TensorRole], dtype: torch.dtype, attention_quant: str | None) -> Weight:
        return self._joined(roles, self._linear_format(roles, dtype, attention_quant))

    def _linear_format(self, roles: list[TensorRole], dtype: torch.dtype, attention_quant: str | None) -> Format:
        weights = [self._weights[role] for role in roles]
        rows = [self._shapes[role][0] for role in roles]
        return joined_format(weights, rows, attention_quant, _ATTENTION_QUANT, dtype)

    def _joined(self, roles: list[TensorRole], form: Format, expert: int = -1) -> Weight:
        """Matrices as one, rows in this order."""
        if self._weights[roles[0]].scheme:
            return as_format(join_rows([self._reader.quantized(role, expert) for role in roles]), form)
        if not form.quantized:
            rows, columns = sum(self._shapes[role][-2] for role in roles), self._shapes[roles[0]][-1]
            return self._copy_plain(roles, torch.empty(rows, columns, dtype=form.dtype), expert)
        joined = torch.cat([self._reader.plain(role, expert) for role in roles])
        try:
            return quantize(joined, form)
        except ValueError as error:
            names = " and ".join(self._weights[role].some_name for role in roles)
            raise CheckpointError(f"tensor {names}: {error}") from error

    def _copy_plain(self, roles: list[TensorRole], target: Tensor, expert: int) -> Tensor:
        """Fill `target`, a matrix as large as all of them, row by row."""
        for role, rows in zip(roles, target.split([self._shapes[role][-2] for role in roles]), strict=True):
            rows.copy_(self._reader.plain(role, expert))
        return target

    def _read(self, role: TensorRole, dtype: torch.dtype) -> Tensor:
        """As plain numbers, however it is stored."""
        if self._weights[role].scheme:
            return dequantize(self._reader.quantized(role), dtype)
        return self._reader.plain(role).to(dtype, copy=True)


def open_checkpoint(model_dir: Path, spec: ModelSpec) -> Checkpoint:
    """Check a checkpoint's headers against the spec and map its files; no weights are read yet.

    Raises CheckpointError that names the tensor (missing, left over, wrong shape or dtype) or the file (truncated), and
    ConfigError for a quantization_config that is not understood.
    """
    quantization = read_quantization(read_config(model_dir))
    return Checkpoint(spec, check_table(read_table(model_dir), quantization, spec, FAMILIES[spec.family]))


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
