"""From config.json's quantization_config to the schemes of a checkpoint's weights."""

from collections.abc import Mapping
from typing import Any

from moe_runtime.quant.checkpoints.awq import read_awq
from moe_runtime.quant.checkpoints.compressed_tensors import read_compressed_tensors
from moe_runtime.quant.checkpoints.fields import Fields
from moe_runtime.quant.checkpoints.fp8 import read_fp8
from moe_runtime.quant.checkpoints.gptq import read_gptq
from moe_runtime.quant.checkpoints.mxfp4 import read_mxfp4
from moe_runtime.quant.checkpoints.scheme import Quantization

_READERS = {
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
}


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """What a config.json says of quantized weights, None where it says nothing.

    Raises ConfigError that names the key, its value and what is supported for everything that is not understood.
    """
    for key in ("compression_config", "quantization"):
        if config.get(key):
            raise Fields("", config).refuse(key, config[key], "quantization_config in its place")
    tree = config.get("quantization_config")
    if tree is None:
        return None
    fields = Fields("quantization_config", tree)
    return _READERS[fields.choose("quant_method", _READERS)](fields)
