"""The topologies and settings in which text must be the same, and how a cluster is started in one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from moe_runtime.bench.server_process import RunningServer, running_server

# 32 prompts of 5 to 75 tokens with 48 new ones need about 2,300 tokens of KV at once.
SMALL_POOL_BLOCKS = 40


@dataclass(frozen=True)
class Setting:
    """M attention nodes, N FFN nodes (0: unsplit), lanes, tokens per step, and whether the KV pool is too small."""

    attention: int
    ffn: int
    lanes: int = 2
    chunk: int = 256
    small_pool: bool = False
    spare: float = 0.0
    transport: str = "auto"

    def __str__(self) -> str:
        pool = "-smallpool" if self.small_pool else ""
        spare = f"-spare{self.spare:g}" if self.spare else ""
        transport = "" if self.transport == "auto" else f"-{self.transport}"
        return f"{self.attention}A{self.ffn}F-lanes{self.lanes}-chunk{self.chunk}{pool}{spare}{transport}"

    def overrides(self) -> list[str]:
        blocks = max(SMALL_POOL_BLOCKS // self.attention, 10) if self.small_pool else 1024
        return [
            f"cluster.attention_nodes={self.attention}",
            f"cluster.ffn_nodes={self.ffn}",
            f"exchange.lanes={self.lanes}",
            f"exchange.transport={self.transport}",
            f"scheduler.max_batch_tokens={self.chunk}",
            f"kv_cache.blocks={blocks}",
            f"eplb.spare_slots={self.spare}",
        ]


# Each value of each setting once at least, in as few clusters as that takes.
SHORT = (
    Setting(1, 1, lanes=1, chunk=256),
    Setting(2, 1, lanes=4, chunk=256, small_pool=True),
    Setting(1, 3, lanes=2, chunk=7, small_pool=True),
    Setting(3, 2, lanes=2, chunk=256, spare=0.25, transport="gloo"),
)
FULL = tuple(
    Setting(attention, ffn, lanes, chunk, small_pool)
    for (attention, ffn), lanes, chunk, small_pool in product(
        ((1, 1), (2, 1), (1, 3), (3, 2)), (1, 2, 4), (7, 256), (False, True)
    )
)


@contextmanager
def cluster(setting: Setting) -> Iterator[RunningServer]:
    with running_server(Path("configs/demo.yaml"), setting.overrides()) as server:
        yield server
