"""How many cores there are, and how many compute threads each node gets."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_runtime.config import Config

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Cores that this process may use: its affinity, and the container's CPU quota rounded up."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = parse_cpu_quota(_CGROUP_QUOTA.read_text(encoding="ascii")) if _CGROUP_QUOTA.is_file() else None
    return min(cores, quota or cores)


def core_ids() -> tuple[int, ...]:
    """The cores' numbers, where the system has them and no quota makes fewer than they are; else empty."""
    if sys.platform != "linux":
        return ()
    ids = tuple(sorted(os.sched_getaffinity(0)))
    return ids if len(ids) == available_cores() else ()


def deal_cores(core_ids: Sequence[int], threads: Sequence[int]) -> list[tuple[int, ...]]:
    """A core of its own for each thread of each node, in order; nodes for which none are left may run anywhere."""
    shares, used = [], 0
    for count in threads:
        share = tuple(core_ids[used : used + count])
        shares.append(share if len(share) == count else ())
        used += count
    return shares


def parse_cpu_quota(text: str) -> int | None:
    """Cores allowed by a cgroup's cpu.max (`QUOTA PERIOD` in microseconds), None for `max`."""
    quota, period = text.split()
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def plan_threads(cores: int, config: Config) -> tuple[int, int]:
    """Compute threads of each attention node and of each FFN node (0 where there is none).

    With one lane attention and FFN nodes alternate, so each role takes all cores in turn; with more they run at once,
    so the cores are divided, half to each role and the remainder to whom it fits. Configured numbers are kept.
    """
    cluster = config.cluster
    attention_nodes, ffn_nodes = cluster.attention_nodes, cluster.ffn_nodes
    if ffn_nodes == 0:
        return cluster.attention_threads or max(1, cores // attention_nodes), 0
    if config.exchange.lanes == 1:
        attention = cluster.attention_threads or max(1, cores // attention_nodes)
        return attention, cluster.ffn_threads or max(1, cores // ffn_nodes)
    ffn_least = ffn_nodes * (cluster.ffn_threads or 1)
    attention = cluster.attention_threads or max(1, min(cores // 2, cores - ffn_least) // attention_nodes)
    ffn = cluster.ffn_threads or max(1, (cores - attention * attention_nodes) // ffn_nodes)
    if not cluster.attention_threads:
        attention = max(attention, (cores - ffn * ffn_nodes) // attention_nodes)
    return attention, ffn
