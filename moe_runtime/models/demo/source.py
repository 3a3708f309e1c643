"""SmolLM2-135M-Instruct, read from GGUF into the tensors and configuration of a Hugging Face LlamaForCausalLM.

Shape suffixes: D hidden, F intermediate, Q query rows (heads x head size), K key rows, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True)
class TokenizerSource:
    """The byte-level BPE that the GGUF carries: pieces by id, merges by rank, special ids, chat template."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    special_ids: tuple[int, ...]
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    chat_template: str


@dataclass(frozen=True)
class DenseModel:
    """SmolLM2 as LlamaForCausalLM stores it: `config` as in config.json, `tensors` in bf16 by Hugging Face name."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    tokenizer: TokenizerSource


def read_dense_model(gguf_path: Path) -> DenseModel:
    """Dequantizes every tensor to fp32, restores the Hugging Face row order of q and k, and rounds to bf16."""
    reader = GGUFReader(gguf_path)
    config = _config(reader)
    rows_of_heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for stored in reader.tensors:
        weight = dequantize(stored.data, stored.tensor_type)
        layer, suffix = _split_layer(stored.name)
        if suffix in rows_of_heads:
            weight = half_split_rows(weight, rows_of_heads[suffix])
        name = _TOP_NAMES[suffix] if layer is None else f"model.layers.{layer}.{_LAYER_NAMES[suffix]}"
        tensors[name] = torch.from_numpy(np.array(weight, dtype=np.float32)).to(torch.bfloat16)
    return DenseModel(config, tensors, _tokenizer_source(reader))


def half_split_rows(weight_QD: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order for rope: from (x0, y0, x1, y1, ...) in each head to (x0, x1, ..., y0, y1, ...)."""
    rows, columns = weight_QD.shape
    pairs = weight_QD.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _split_layer(name: str) -> tuple[int | None, str]:
    if not name.startswith("blk."):
        return None, name
    _, layer, suffix = name.split(".", 2)
    return int(layer), suffix


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, f"the GGUF has no field {key}; its sha256 should have told"
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": _field(reader, "llama.rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        # The GGUF holds 1e-5 rounded to fp32; the shortest decimal that rounds to it is what was published.
        "rms_norm_eps": float(str(np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon")))),
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _tokenizer_source(reader: GGUFReader) -> TokenizerSource:
    control_type = 3  # the GGUF's token type for special tokens
    types = _field(reader, "tokenizer.ggml.token_type")
    return TokenizerSource(
        tokens=tuple(_field(reader, "tokenizer.ggml.tokens")),
        merges=tuple(_field(reader, "tokenizer.ggml.merges")),
        special_ids=tuple(index for index, kind in enumerate(types) if kind == control_type),
        bos_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        unk_id=_field(reader, "tokenizer.ggml.unknown_token_id"),
        pad_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        chat_template=_field(reader, "tokenizer.chat_template"),
    )
