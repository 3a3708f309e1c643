"""Paged attention by the C++ kernel: blocks read in place, float32 or bfloat16, on the CPU.

Legend: T tokens, A query heads, G kv heads, D head dimension, N blocks, B tokens a block.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from moe_runtime.kernels.attention_plan import SliceTable
from moe_runtime.kernels.native.library import library, usual_isa

_MOST_DIM, _MOST_HEADS_PER_KV_HEAD = 256, 64  # as attention.cpp has them


class Attention(ctypes.Structure):
    """MoeAttention of abi.h, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "keys", "values", "out")),
        *((name, c_void_p) for name in ("first_rows", "starts", "tokens", "table_begins", "tables")),
        ("blocks", c_int64),
        *((name, c_int32) for name in ("slices", "heads", "kv_heads", "dim", "block_size", "window")),
        *((name, c_int32) for name in ("bfloat16", "threads")),
        ("scale", c_float),
    )


def can_attend(q_TAD: Tensor, keys_GNBD: Tensor) -> bool:
    """Whether the kernel is there and made for these tensors."""
    return (
        q_TAD.device.type == "cpu"
        and q_TAD.dtype in (torch.float32, torch.bfloat16)
        and q_TAD.dtype == keys_GNBD.dtype
        and q_TAD.shape[2] <= _MOST_DIM
        and q_TAD.shape[1] <= _MOST_HEADS_PER_KV_HEAD * keys_GNBD.shape[0]
        and _built()
    )


def native_attention(
    q_TAD: Tensor, keys_GNBD: Tensor, values_GNBD: Tensor, table: SliceTable, window: int | None, scale: float
) -> Tensor:
    """See kernels.paged_attention. Computes with as many threads as torch has."""
    kernels = library()
    assert kernels is not None and keys_GNBD.is_contiguous() and values_GNBD.is_contiguous()
    q_TAD = q_TAD.contiguous()
    out_TAD = torch.empty_like(q_TAD)
    kv_heads, blocks, block_size, dim = keys_GNBD.shape
    call = Attention(
        q_TAD.data_ptr(),
        keys_GNBD.data_ptr(),
        values_GNBD.data_ptr(),
        out_TAD.data_ptr(),
        *(part.ctypes.data for part in (table.first_rows_S, table.starts_S, table.counts_S, table.table_begins)),
        table.tables.ctypes.data,
        blocks,
        len(table.starts_S),
        q_TAD.shape[1],
        kv_heads,
        dim,
        block_size,
        window or 0,
        q_TAD.dtype is torch.bfloat16,
        torch.get_num_threads(),
        scale,
    )
    failed = kernels.moe_attention(ctypes.byref(call))
    assert not failed, "can_attend was not asked"
    return out_TAD.view(len(q_TAD), -1)


@cache
def _built() -> bool:
    """MOE_RUNTIME_NATIVE=off switches this kernel off too."""
    kernels = library()
    return kernels is not None and usual_isa() >= 0 and hasattr(kernels, "moe_attention")
