"""Which processes a cluster consists of, as a pure function of the configuration."""

from dataclasses import dataclass

from moe_runtime.cluster.cores import plan_threads
from moe_runtime.config import Config
from moe_runtime.protocol.control import Role


@dataclass(frozen=True)
class NodePlan:
    """One process to start: `index` counts within its role, `threads` are its compute threads."""

    name: str
    role: Role
    index: int
    threads: int


def plan_nodes(config: Config, cores: int) -> tuple[NodePlan, ...]:
    """FFN nodes f0.., attention nodes a0.., then the gateway: the order in which they become ready."""
    attention_threads, ffn_threads = plan_threads(cores, config)
    ffn = [NodePlan(f"f{i}", "ffn", i, ffn_threads) for i in range(config.cluster.ffn_nodes)]
    attention = [NodePlan(f"a{i}", "attention", i, attention_threads) for i in range(config.cluster.attention_nodes)]
    return (*ffn, *attention, NodePlan("gateway0", "gateway", 0, 1))


def describe_plan(nodes: tuple[NodePlan, ...], cores: int) -> str:
    """One line for the user: nodes of each role and their threads, on how many cores."""
    parts = []
    for role in ("attention", "ffn"):
        group = [node for node in nodes if node.role == role]
        if group:
            plural = "s" if group[0].threads > 1 else ""
            parts.append(f"{len(group)} {role} x {group[0].threads} thread{plural}")
    return f"plan: {', '.join(parts)}, 1 gateway on {cores} core{'s' if cores > 1 else ''}"
