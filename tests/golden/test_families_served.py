"""Five families through what serves them, against transformers: paged cache, packed weights, placement, and in the
split case links, merging and partial sums over two FFN nodes. Logits at every position of a prompt, decoded and in
chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from attention_nodes.cache.block_pool import BlockPool
from attention_nodes.cache.kv_store import KvStore
from attention_nodes.forward.local_experts import LocalExperts
from attention_nodes.forward.model import AttentionModel, ExpertCall
from attention_nodes.forward.remote_experts import RemoteExperts
from attention_nodes.scheduling.batch import Batch, Slice
from attention_nodes.scheduling.request import Request
from eplb import round_robin
from ffn_nodes.gather import GatherQueue
from ffn_nodes.server import ExpertServer
from moe_runtime.config import ExchangeConfig
from moe_runtime.models.demo import write_random_model
from moe_runtime.models.expert_layers import load_expert_layers
from moe_runtime.models.loader import Checkpoint, open_checkpoint
from moe_runtime.models.packing import pack_attention
from moe_runtime.models.registry import load_spec
from moe_runtime.protocol.messages import SamplingParams
from moe_runtime.transport.handshake import LinkOptions
from moe_runtime.transport.inproc import link_pair

TOKENS = 24
CPU = torch.device("cpu")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"sliding_window": 7}),
    ("qwen2_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    ("qwen3_moe", {}),
    ("olmoe", {"clip_qkv": 0.4}),
    ("granitemoe", {}),
]
Experts = Callable[[ExpertCall], Tensor]


def unsplit(checkpoint: Checkpoint) -> Experts:
    placement = round_robin(checkpoint.spec.experts, ("a0",))
    layers = load_expert_layers(checkpoint, checkpoint.spec, placement, 0, torch.float32, CPU, lambda *_: None)
    return LocalExperts(layers, placement, CPU)


def split(checkpoint: Checkpoint) -> Experts:
    """Two FFN nodes with spare replicas, over in-process links."""
    spec = checkpoint.spec
    placement = round_robin(spec.experts, ("f0", "f1"), spare=0.5)
    links, servers = {}, []
    for node, name in enumerate(placement.nodes):
        ends = [LinkOptions(n, 0, 1, "float32", 1 << 20, ExchangeConfig()) for n in ("a0", name)]
        links[node], far = link_pair(*ends)
        layers = load_expert_layers(checkpoint, spec, placement, node, torch.float32, CPU, lambda *_: None)
        servers.append((ExpertServer(spec, layers, torch.float32, 0, 1, GatherQueue("laggard_first", 0)), far))
    remote, step = RemoteExperts(0, links, placement, 1), iter(range(10_000))

    def call_experts(call: ExpertCall) -> Tensor:
        remote.dispatch(0, next(step), 0, call)
        for server, far in servers:
            while (frame := far.receive()) is not None:
                server.receive(far, frame)
            assert server.serve() == []
        done = [remote.accept(node, frame) for node, link in links.items() if (frame := link.receive()) is not None]
        assert done[-1] == 0
        return remote.finish(0).total()

    return call_experts


def served_logits(checkpoint: Checkpoint, experts: Experts, ids: Sequence[int], before_ends: Sequence[int]) -> Tensor:
    """Logits [T, V]: request i holds ids[: i + 1], so that its last position's logits are what a step returns.

    before_ends: where each request's pieces end, as distances from its own end.
    """
    spec, pool = checkpoint.spec, BlockPool(256, 4)
    weights = pack_attention(checkpoint.attention_weights(torch.float32, lambda *_: None))
    model = AttentionModel(spec, weights, KvStore(spec, pool.total, pool.block_size, torch.float32, CPU))
    requests = [
        Request(f"r{i}", b"", list(ids[: i + 1]), i + 1, SamplingParams(max_tokens=1), i, 11 * i)
        for i in range(len(ids))
    ]
    for request in requests:
        request.blocks = pool.allocate(pool.blocks_for(len(request.tokens))) or []
    logits_TV = torch.zeros(len(ids), spec.vocab)
    for before_end in before_ends:
        slices = []
        for request in requests:
            end = max(len(request.tokens) - before_end, 0)
            if end > request.computed:
                slices.append(Slice(request, request.computed, end - request.computed))
        slices.sort(key=lambda piece: piece.count > 1)
        batch = Batch(tuple(slices))
        last_P = torch.tensor([piece.count for piece in slices]).cumsum(0) - 1
        rows = run_step(model, experts, batch, last_P)
        for piece, row in zip(slices, rows, strict=True):
            logits_TV[piece.end - 1] = row
            piece.request.computed = piece.end
    return logits_TV


def run_step(model: AttentionModel, experts: Experts, batch: Batch, rows_P: Tensor) -> Tensor:
    """Logits [P, V] after the tokens of these rows."""
    with torch.inference_mode():
        step = model.step(batch)
        try:
            call = next(step)
            while True:
                call = step.send(experts(call))
        except StopIteration as end:
            return model.logits(end.value[rows_P])


@pytest.mark.parametrize("build", [unsplit, split], ids=["unsplit", "split"])
@pytest.mark.parametrize("before_ends", [(0,), (6, 1, 0)], ids=["whole prompts", "chunks, then decode"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_served_logits_equal_transformers(
    case: tuple[str, Mapping[str, Any]],
    before_ends: tuple[int, ...],
    build: Callable[[Checkpoint], Experts],
    tmp_path: Path,
) -> None:
    family, overrides = case
    write_random_model(family, tmp_path / "model", seed=5, overrides=overrides)
    checkpoint = open_checkpoint(tmp_path / "model", load_spec(tmp_path / "model"))
    ids = torch.randint(0, checkpoint.spec.vocab, (TOKENS,), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        theirs_TV = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)(ids[None]).logits[0]
    ours_TV = served_logits(checkpoint, build(checkpoint), ids.tolist(), before_ends)
    assert theirs_TV.std() > 0.1
    assert (ours_TV - theirs_TV).abs().max() <= 1e-4
