"""Which processes a cluster consists of, as a pure function of the configuration."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.cluster.cores import deal_cores, plan_threads
from moe_runtime.config import Config
from moe_runtime.protocol.control import Role


@dataclass(frozen=True)
class NodePlan:
    """One process to start: `index` counts within its role, `threads` are its compute threads.

    cores: what it is pinned to; empty where it may run anywhere.
    """

    name: str
    role: Role
    index: int
    threads: int
    cores: tuple[int, ...] = ()


def plan_nodes(config: Config, cores: int, core_ids: Sequence[int] = ()) -> tuple[NodePlan, ...]:
    """FFN nodes f0.., attention nodes a0.., then the gateway: the order in which they become ready.

    FFN nodes are pinned, since all of them work at the same moment: left alone, the kernel wakes several on the core of
    the attention node that wrote to them, where they run one after the other.
    """
    attention_threads, ffn_threads = plan_threads(cores, config)
    pinned = deal_cores(core_ids, [ffn_threads] * config.cluster.ffn_nodes)
    ffn = [NodePlan(f"f{i}", "ffn", i, ffn_threads, pinned[i]) for i in range(config.cluster.ffn_nodes)]
    attention = [NodePlan(f"a{i}", "attention", i, attention_threads) for i in range(config.cluster.attention_nodes)]
    return (*ffn, *attention, NodePlan("gateway0", "gateway", 0, 1))


def describe_plan(nodes: tuple[NodePlan, ...], cores: int) -> str:
    """One line for the user: nodes of each role and their threads, on how many cores."""
    parts = []
    for role in ("attention", "ffn"):
        group = [node for node in nodes if node.role == role]
        if group:
            plural = "s" if group[0].threads > 1 else ""
            pinned = ", ".join("+".join(map(str, node.cores)) for node in group if node.cores)
            where = f" on core {pinned}" if pinned else ""
            parts.append(f"{len(group)} {role} x {group[0].threads} thread{plural}{where}")
    return f"plan: {', '.join(parts)}, 1 gateway on {cores} core{'s' if cores > 1 else ''}"
