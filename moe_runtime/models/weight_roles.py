"""The one function that decides what each checkpoint tensor is and which role owns it, and which tensors a spec needs.

Legend: V vocabulary, H hidden, Q = heads * D, D head dimension, I intermediate, E routed experts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_runtime.models.family import Family
from moe_runtime.models.spec import FfnSpec, ModelSpec

Role = Literal["attention", "ffn"]

_FFN_PARTS = frozenset({"gate", "up", "down", "all_gate_up", "all_down"})
_MODEL_TENSORS = {"model.embed_tokens.weight": "embed", "model.norm.weight": "final_norm", "lm_head.weight": "lm_head"}
_ATTENTION_TENSORS = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    **{f"self_attn.{part}_proj.weight": part for part in "qkvo"},
    **{f"self_attn.{part}_proj.bias": f"{part}_bias" for part in "qkvo"},
}
# Buffers that old versions of transformers saved; the spec carries what they say.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class TensorRole:
    """What a checkpoint tensor is; `expert` is a logical expert's number, -1 where it belongs to none or to all."""

    part: str
    layer: int = -1
    expert: int = -1

    @property
    def owner(self) -> Role:
        return "ffn" if self.part in _FFN_PARTS else "attention"


def is_ignored(name: str) -> bool:
    """Whether a tensor is a known buffer that carries nothing."""
    return _IGNORED.fullmatch(name) is not None


def role_of(name: str, spec: ModelSpec, family: Family) -> TensorRole | None:
    """The role of a checkpoint tensor by its name, or None for a name that this model has no use for."""
    if name in _MODEL_TENSORS:
        return TensorRole(_MODEL_TENSORS[name])
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) >= len(spec.layers):
        return None
    layer, rest = int(match[1]), match[2]
    if rest in _ATTENTION_TENSORS:
        return TensorRole(_ATTENTION_TENSORS[rest], layer)
    prefix, _, below = rest.partition(".")
    if prefix not in family.prefixes:
        return None
    return _ffn_role(below, layer, spec.layers[layer].ffn, family)


def _ffn_role(below: str, layer: int, ffn: FfnSpec, family: Family) -> TensorRole | None:
    names = family.moe_tensors if ffn.routed else family.dense_tensors
    numbers = _NUMBER.findall(below)
    part = names.get(_NUMBER.sub("*", below))
    if part is None or (numbers and int(numbers[0]) >= ffn.routed):
        return None
    if part not in ("gate", "up", "down"):
        return TensorRole(part, layer)
    # Unnumbered projections are the expert that every token picks: its logical number follows the routed ones.
    return TensorRole(part, layer, int(numbers[0]) if numbers else ffn.routed)


def name_of(role: TensorRole, spec: ModelSpec, family: Family) -> str:
    """The usual checkpoint name of a role, for messages about tensors that are missing."""
    for name, part in _MODEL_TENSORS.items():
        if part == role.part:
            return name
    for name, part in _ATTENTION_TENSORS.items():
        if part == role.part:
            return f"model.layers.{role.layer}.{name}"
    ffn = spec.layers[role.layer].ffn
    numbered = 0 <= role.expert < ffn.routed
    for name, part in (family.moe_tensors if ffn.routed else family.dense_tensors).items():
        if part == role.part and ("*" in name) == numbered:
            return f"model.layers.{role.layer}.{family.prefixes[0]}.{name.replace('*', str(role.expert))}"
    raise AssertionError(f"{role} has no name")


def attention_shapes(spec: ModelSpec) -> dict[TensorRole, tuple[int, ...]]:
    """Every tensor an attention node needs, with its shape; a tied LM head is not among them."""
    shapes: dict[TensorRole, tuple[int, ...]] = {
        TensorRole("embed"): (spec.vocab, spec.hidden),
        TensorRole("final_norm"): (spec.hidden,),
    }
    if not spec.tied_embeddings:
        shapes[TensorRole("lm_head")] = (spec.vocab, spec.hidden)
    for layer in range(len(spec.layers)):
        shapes.update({TensorRole(part, layer): shape for part, shape in _attention_parts(spec, layer)})
    return shapes


def _attention_parts(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield from (("input_norm", (spec.hidden,)), ("post_norm", (spec.hidden,)))
    yield from (("q", (q_rows, spec.hidden)), ("k", (kv_rows, spec.hidden)), ("v", (kv_rows, spec.hidden)))
    yield "o", (spec.hidden, q_rows)
    if spec.qkv_bias:
        yield from (("q_bias", (q_rows,)), ("k_bias", (kv_rows,)), ("v_bias", (kv_rows,)))
    if spec.o_bias:
        yield "o_bias", (spec.hidden,)
    if spec.qk_norm != "none":
        full = spec.qk_norm == "full"
        yield from (("q_norm", (q_rows if full else spec.head_dim,)), ("k_norm", (kv_rows if full else spec.head_dim,)))
    ffn = spec.layers[layer].ffn
    if ffn.routed:
        yield "router", (ffn.routed, spec.hidden)
    if ffn.shared_gate:
        yield "shared_gate", (1, spec.hidden)


def expert_shapes(spec: ModelSpec, layer: int, expert: int) -> dict[TensorRole, tuple[int, ...]]:
    """The three matrices of one logical expert where they are stored apart."""
    rows = spec.layers[layer].ffn.intermediate_of(expert)
    return {
        TensorRole("gate", layer, expert): (rows, spec.hidden),
        TensorRole("up", layer, expert): (rows, spec.hidden),
        TensorRole("down", layer, expert): (spec.hidden, rows),
    }


def fused_shapes(spec: ModelSpec, layer: int) -> dict[TensorRole, tuple[int, ...]]:
    """The two 3-D tensors of a layer's routed experts where they are stored together, in transformers' order."""
    ffn = spec.layers[layer].ffn
    return {
        TensorRole("all_gate_up", layer): (ffn.routed, 2 * ffn.intermediate, spec.hidden),
        TensorRole("all_down", layer): (ffn.routed, spec.hidden, ffn.intermediate),
    }
