"""quant_method fp8: DeepSeek's blocks of 128 x 128, and one scale per tensor (AutoFP8).

Activations stay in floating point here, so that what a checkpoint says of quantizing them, dynamically or with a
stored input_scale, is not needed: it approximates what is computed here.
"""

from moe_runtime.quant.checkpoints.fields import Fields
from moe_runtime.quant.checkpoints.plain_numbers import PlainNumbers
from moe_runtime.quant.checkpoints.scheme import Quantization, everything, left_plain
from moe_runtime.quant.formats import FORMATS


def read_fp8(fields: Fields) -> Quantization:
    """The scheme of a quantization_config with quant_method fp8."""
    fields.choose("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.choose("fmt", ("e4m3",), "e4m3")
    fields.choose("scale_fmt", ("float", "ue8m0", None), "float")  # in both cases stored as numbers: see SCALE_DTYPES
    fields.choose("expert_dtype", ("fp8",), "fp8")
    fields.choose("dequantize", (False,), False)
    fields.choose("modules_to_convert", (None, []), None)
    fields.choose("kv_cache_scheme", (None,), None)
    plain = left_plain(fields.names("modules_to_not_convert") + fields.names("ignored_layers"))
    block = fields.choose("weight_block_size", (None, [128, 128]), None)
    fields.finish()
    scheme = (
        PlainNumbers("fp8", FORMATS["fp8-block"], scales=".weight_scale_inv")
        if block
        else PlainNumbers("fp8", FORMATS["fp8"], per_tensor=True)
    )
    return Quantization("fp8", (plain, everything(scheme)), complete=False, unused=(".input_scale",))
