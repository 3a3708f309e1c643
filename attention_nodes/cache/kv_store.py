"""The KV cache's memory: one pool of blocks per layer for keys and one for values.

Legend: G kv heads, N blocks, B tokens a block, D head dimension, T tokens.
Heads come first in the layout, so that gathering a batch's blocks yields [G, batch, tokens, D] without a transpose.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.config import KvCacheConfig
from moe_runtime.errors import ConfigError
from moe_runtime.models.spec import ModelSpec


class KvStore:
    """Keys and values of all layers, [G, N, B, D] each; pages are touched only when written."""

    def __init__(self, spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.kv_heads, blocks, block_size, spec.head_dim)
        self.block_size = block_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in spec.layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in spec.layers]

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Store new tokens' keys and values; slot = block id * block_size + offset, int64 [T]."""
        for pool, new_TGD in ((self.keys[layer], k_TGD), (self.values[layer], v_TGD)):
            flat = pool.view(pool.shape[0], -1, pool.shape[3])
            flat.index_copy_(1, slots_T, new_TGD.transpose(0, 1).to(pool.dtype))


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    return 2 * len(spec.layers) * spec.kv_heads * block_size * spec.head_dim * dtype.itemsize


def plan_blocks(
    spec: ModelSpec, config: KvCacheConfig, dtype: torch.dtype, device: torch.device, sharers: int, most_tokens: int
) -> int:
    """How many blocks the pool gets: as configured, or a fraction of free memory over the nodes that share it.

    Never more than most_tokens can use. Raises ConfigError when not even one block fits.
    """
    if config.blocks is not None:
        return config.blocks
    size = bytes_per_block(spec, config.block_size, dtype)
    budget = int(free_memory(device) * config.memory_fraction) // sharers
    if budget < size:
        raise ConfigError(
            f"kv_cache.memory_fraction {config.memory_fraction} leaves {budget} bytes, one block needs {size}; "
            "raise it, or set kv_cache.blocks"
        )
    return min(budget // size, -(-most_tokens // config.block_size))


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken now: of the GPU, or of this machine without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
