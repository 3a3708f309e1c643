"""Tiny checkpoints as others publish them, made of a random one: quantized here, and packed by each definition.

Legend: N outputs, K inputs, C groups, E experts, I intermediate.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_runtime.quant import fourbit
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import QuantizedTensor

Tensors = dict[str, Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed_rows(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """By definition: number r of a column is in word r // (32 / bits), at bit bits * (r % (32 / bits)).

    order: which number of a word comes first, second, ...
    """
    per_word = 32 // bits
    place = [*range(per_word)] if order is None else [order.index(number) for number in range(per_word)]
    words = np.zeros((numbers.shape[0] // per_word, numbers.shape[1]), dtype=np.uint32)
    for row, line in enumerate(numbers.astype(np.uint32)):
        words[row // per_word] |= line << np.uint32(bits * place[row % per_word])
    return torch.from_numpy(words.view(np.int32))


def gptq_parts(weight: QuantizedTensor) -> Tensors:
    codes_NK = fourbit.unpack(weight.values, weight.columns).numpy()
    assert weight.zeros_RC is not None
    group = torch.arange(weight.columns, dtype=torch.int32) // weight.format.group[1]
    return {
        ".qweight": packed_rows(codes_NK.T, 4),
        ".qzeros": packed_rows((weight.zeros_RC.numpy() - 1) % 16, 4).T.contiguous(),
        ".scales": weight.scales_RC.T.contiguous(),
        ".g_idx": group,
    }


def awq_parts(weight: QuantizedTensor) -> Tensors:
    codes_NK = fourbit.unpack(weight.values, weight.columns).numpy()
    assert weight.zeros_RC is not None
    return {
        ".qweight": packed_rows(codes_NK, 4, _AWQ_ORDER).T.contiguous(),
        ".qzeros": packed_rows(weight.zeros_RC.numpy(), 4, _AWQ_ORDER).T.contiguous(),
        ".scales": weight.scales_RC.T.contiguous(),
    }


def block_parts(weight: QuantizedTensor) -> Tensors:
    return {".weight": weight.values, ".weight_scale_inv": weight.scales_RC.bfloat16()}


def tensor_parts(weight: QuantizedTensor) -> Tensors:
    """One scale, a power of two, for values as they are."""
    return {".weight": weight.values, ".weight_scale": torch.tensor(0.25), ".input_scale": torch.tensor(0.5)}


PUBLISHED: dict[str, tuple[str, dict[str, Any], Callable[[QuantizedTensor], Tensors]]] = {
    "gptq": ("w4a16-g32-zp", {"bits": 4, "group_size": 32, "sym": False, "lm_head": True}, gptq_parts),
    "awq": ("w4a16-g32-zp", {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq_parts),
    "fp8-blocks": ("fp8-block", {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}, block_parts),
    "fp8-tensor": ("fp8", {"activation_scheme": "static", "ignored_layers": ["model.layers.0.mlp.gate"]}, tensor_parts),
}  # fmt: skip


def publish(
    model_dir: Path, kind: str, *, plain: tuple[str, ...] = ("gate", "embed_tokens")
) -> dict[str, QuantizedTensor]:
    """Rewrite a plain checkpoint's matrices in place; the quantized weights by module, as they were packed."""
    form, config, parts_of = PUBLISHED[kind]
    packed: dict[str, QuantizedTensor] = {}

    def change(tensors: Tensors) -> None:
        for name in [name for name, x in tensors.items() if x.dim() == 2]:
            module = name.removesuffix(".weight")
            if module.rsplit(".", 1)[-1] not in plain:
                packed[module] = quantize(tensors.pop(name), FORMATS[form])
                tensors.update({module + suffix: part for suffix, part in parts_of(packed[module]).items()})

    edit(model_dir, change)
    set_quantization(model_dir, {"quant_method": kind.split("-")[0], **config})
    return packed


def publish_gpt_oss(model_dir: Path) -> dict[str, QuantizedTensor]:
    """Fused experts in mxfp4, gate and up rows alternating; weights by tensor and expert, gate rows first."""
    packed: dict[str, QuantizedTensor] = {}

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj") and tensors[name].dim() == 3]:
            stack_ENK = quantize(tensors.pop(name), FORMATS["mxfp4"])
            blocks, scales = stack_ENK.values, stack_ENK.scales_RC
            if "gate_up" in name:
                blocks, scales = (torch.stack(part.chunk(2, dim=1), dim=2).flatten(1, 2) for part in (blocks, scales))
            tensors[name + "_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
            tensors[name + "_scales"] = scales.contiguous()
            packed.update({f"{name}.{expert}": stack_ENK[expert] for expert in range(len(blocks))})

    edit(model_dir, change)
    set_quantization(model_dir, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return packed


def edit(model_dir: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of model.safetensors."""
    file = model_dir / "model.safetensors"
    tensors = {name: x.clone() for name, x in load_file(file).items()}
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, file, metadata={"format": "pt"})


def set_quantization(model_dir: Path, tree: Mapping[str, Any] | None) -> None:
    """Change config.json's quantization_config."""
    file = model_dir / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "quantization_config": tree}), encoding="utf-8")


def quantization_of(model_dir: Path) -> dict[str, Any]:
    return dict(json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["quantization_config"])
