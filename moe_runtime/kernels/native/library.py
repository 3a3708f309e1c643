"""The shared library of the CPU kernels: found, checked and declared for ctypes, which frees the interpreter's lock.

Structs mirror abi.h field by field. The environment's MOE_RUNTIME_NATIVE picks one of the instruction sets below, or
`off` none.
"""

import ctypes
import logging
import os
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec

_LOG = logging.getLogger(__name__)
_ABI = 3
INSTRUCTION_SETS = ("avx512bf16", "avx512", "avx2", "portable")
ENVIRONMENT = "MOE_RUNTIME_NATIVE"

OK, NO_MEMORY, BAD_SLOT, EMPTY_SLOT = range(4)


class Matrix(ctypes.Structure):
    """How one weight lies in a record; `plan` fills in what follows `gated`."""

    _fields_ = (
        *((name, c_int32) for name in ("values", "scales", "rows", "columns", "group_rows", "group")),
        *((name, c_int32) for name in ("zero_points", "gated", "blocks", "padded", "groups", "span", "spans")),
        *((name, c_int32) for name in ("words", "word_scales", "stretch_log")),
        *((name, c_int64) for name in ("span_bytes", "head_bytes", "stretch_bytes", "block_bytes", "bytes")),
    )


class Bank(ctypes.Structure):
    _fields_ = (
        ("gate_up", Matrix),
        ("down", Matrix),
        ("gate_up_records", c_void_p),
        ("down_records", c_void_p),
        ("stored", c_void_p),
        ("experts", c_int64),
    )


class Call(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "slots", "weights", "y")),
        ("tokens", c_int64),
        *((name, c_int32) for name in ("picks", "x_type", "wide_slots", "threads", "isa", "unused")),
        ("bad_slot", c_int64),
    )


class Linear(ctypes.Structure):
    _fields_ = (("matrix", Matrix), ("record", c_void_p), ("bias", c_void_p))


class LinearCall(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("tokens", c_int64),
        *((name, c_int32) for name in ("x_type", "threads", "isa")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The library, None where it was not built; says so once."""
    spec = find_spec("moe_runtime.kernels.native._kernels")
    if spec is None or spec.origin is None:
        _LOG.warning("the C++ kernels were not built (no C++ compiler at install?): quantized weights will be slow")
        return None
    try:
        found = ctypes.CDLL(spec.origin)
    except OSError as error:
        _LOG.warning("the C++ kernels cannot be loaded: %s", error)
        return None
    if found.moe_abi() != _ABI:
        _LOG.warning("the C++ kernels are of another version: install again")
        return None
    _declare(found)
    return found


@cache
def isa_named(name: str) -> int:
    """The library's number of an instruction set ("" for the best), -1 where the machine or the library has none."""
    found = library()
    return -1 if found is None else int(found.moe_isa(name.encode()))


def usual_isa() -> int:
    """What the environment asks for, else the best there is; -1 where the native kernels cannot serve.

    Raises ValueError for a name that is unknown or not this machine's.
    """
    name = os.environ.get(ENVIRONMENT, "")
    if name == "off":
        return -1
    isa = isa_named(name)
    if isa < 0 and name:
        raise ValueError(f"{ENVIRONMENT} is {name!r}: this machine has {', '.join(here()) or 'no native kernels'}")
    return isa


def here() -> tuple[str, ...]:
    """The instruction sets that this machine's library offers, best first."""
    return tuple(name for name in INSTRUCTION_SETS if isa_named(name) >= 0)


def _declare(found: ctypes.CDLL) -> None:
    signatures: dict[str, tuple[object, list[object]]] = {
        "moe_isa": (c_int32, [c_char_p]),
        "moe_plan": (c_int32, [POINTER(Matrix), c_int32]),
        "moe_pack": (None, [POINTER(Matrix), c_void_p, c_void_p, c_void_p, c_void_p]),
        "moe_unpack": (None, [POINTER(Matrix), c_void_p, c_void_p, c_void_p, c_void_p]),
        "moe_huge_pages": (None, [c_void_p, c_int64]),
        "moe_experts": (c_int32, [POINTER(Bank), POINTER(Call)]),
        "moe_linear": (c_int32, [POINTER(Linear), POINTER(LinearCall)]),
        "moe_peak": (c_double, [c_int32, c_char_p, c_int32, c_int64]),
        "moe_read_bandwidth": (c_double, [c_void_p, c_int64, c_int32, c_int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
