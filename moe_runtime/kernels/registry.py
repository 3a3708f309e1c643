"""Which back end computes: by device, by format, and by what this machine has. All of them keep one contract.

| device | experts | linear layers |
|---|---|---|
| CPU | native_bank | native_linear for quantized weights, else kernels.linear |
| CPU without the native extension | onednn_bank for float32 and bfloat16, else plain_bank | kernels.linear |
| CUDA | triton.bank | triton.linear for quantized weights, else kernels.linear |
| other | plain_bank | kernels.linear |
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from moe_runtime.kernels.bank import BankShape, ExpertBank
from moe_runtime.kernels.linear import can_pack, linear
from moe_runtime.kernels.native import library as native
from moe_runtime.kernels.native_bank import NativeBank
from moe_runtime.kernels.native_linear import NativeLinear
from moe_runtime.kernels.onednn_bank import OneDnnBank
from moe_runtime.kernels.plain_bank import PlainBank
from moe_runtime.kernels.workers import Workers
from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor

Linear = Callable[[Tensor], Tensor]


def expert_bank(shape: BankShape, device: torch.device, workers: Workers) -> ExpertBank:
    """An empty bank. workers: a CPU bank computes with as many threads, and banks that need some share these.

    Raises ValueError where the environment asks for native kernels that this machine does not have.
    """
    match expert_back_end(shape.format, device):
        case "triton":
            from moe_runtime.kernels.triton.bank import TritonBank  # triton is there with CUDA only

            return TritonBank(shape, device)
        case "onednn":
            return OneDnnBank(shape, workers)
        case "native":
            return NativeBank(shape, workers.threads)
        case _:
            return PlainBank(shape, device)


def quantized_linear(weight_NK: QuantizedTensor, bias_N: Tensor | None = None) -> Linear:
    """x [..., K] to x @ weight.T + bias [..., N] on the weight's device, with as many threads as torch has."""
    device = weight_NK.values.device
    if device.type == "cuda" and find_spec("triton"):
        from moe_runtime.kernels.triton.linear import TritonLinear

        return TritonLinear(weight_NK, bias_N)
    if device.type == "cpu" and native.usual_isa() >= 0:
        return NativeLinear(weight_NK, bias_N)
    return lambda x_TK: linear(x_TK, weight_NK, bias_N)


def expert_back_end(form: Format, device: torch.device) -> str:
    """`triton`, `onednn`, `native` or `plain`: which of them `expert_bank` gives."""
    if device.type == "cuda" and find_spec("triton"):
        return "triton"
    if device.type != "cpu":
        return "plain"
    if native.usual_isa() >= 0:
        return "native"
    return "onednn" if not form.quantized and can_pack(torch.empty(1, 1, dtype=form.dtype)) else "plain"
