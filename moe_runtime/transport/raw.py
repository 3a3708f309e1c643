"""Copies between tensors and plain addresses: one memmove each, no thread pool, any dtype.

Tensor.copy_ would do, but above 32 KB it wakes torch's compute threads, which costs milliseconds on a busy machine.
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.protocol.payload import aligned


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping starts; valid until the mapping is closed (no reference is kept)."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def copy_in(address: int, parts: Sequence[Tensor], size: int) -> None:
    """Lay CPU parts out at an address as payload.pack_into does. Raises ValueError unless they take `size` bytes."""
    offset = 0
    for part in parts:
        length = part.nbytes
        assert part.is_cpu, part.device
        if offset + length > size:
            raise ValueError(f"the header announces {size} payload bytes, the parts take more")
        source = part.contiguous()
        ctypes.memmove(address + offset, source.data_ptr(), length)
        offset += aligned(length)
    if offset != size:
        raise ValueError(f"the header announces {size} payload bytes, the parts take {offset}")


def copy_out(address: int, size: int) -> Tensor:
    """A new uint8 tensor [size] with the bytes at an address."""
    payload = torch.empty(size, dtype=torch.uint8)
    ctypes.memmove(payload.data_ptr(), address, size)
    return payload
