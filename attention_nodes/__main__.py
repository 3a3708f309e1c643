"""`python -m attention_nodes`: load this node's half of the model, link to the FFN nodes, serve until told to stop."""

import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from attention_nodes.cache.block_pool import BlockPool
from attention_nodes.cache.kv_store import KvStore, plan_blocks
from attention_nodes.engine import Engine
from attention_nodes.forward.local_experts import LocalExperts
from attention_nodes.forward.model import AttentionModel
from attention_nodes.forward.remote_experts import RemoteExperts
from attention_nodes.forward.threads import StepThreads
from attention_nodes.forward.token_split import BucketSplit, ExactSplit, TokenSplit, expected_visits
from attention_nodes.scheduling.admission import Admission
from attention_nodes.scheduling.scheduler import Scheduler
from attention_nodes.service import AttentionService, RequestSocket
from attention_nodes.step_metrics import StepMetrics
from moe_runtime.cluster.controller_client import ControllerClient
from moe_runtime.cluster.node_main import NodeContext, run_node
from moe_runtime.metrics import Metrics
from moe_runtime.models.expert_layers import load_expert_layers
from moe_runtime.models.heap import trim_heap
from moe_runtime.models.loader import Checkpoint, open_checkpoint
from moe_runtime.models.packing import pack_attention
from moe_runtime.protocol.control import LinkAddress, RequestAddress
from moe_runtime.transport.base import Link
from moe_runtime.transport.connect import connect


def serve(node: NodeContext, controller: ControllerClient) -> None:
    checkpoint = open_checkpoint(Path(node.welcome.model_dir), node.spec)
    quant = node.config.model.attention_quant
    weights = pack_attention(checkpoint.attention_weights(node.dtype, controller.progress, quant))
    links = _connect(node, controller.wait_peers().ffn) if node.config.cluster.ffn_nodes else {}
    experts = _experts(node, checkpoint, links, controller)
    del checkpoint  # with its mapped files
    trim_heap()
    # Experts in this process leave nothing to overlap.
    lanes = node.config.exchange.lanes if links else 1
    pool = _pool(node, lanes)
    kv = KvStore(node.spec, pool.total, pool.block_size, node.dtype, node.device)
    scheduler = Scheduler(node.config.scheduler, pool, lanes, Admission(pool, node.max_context, node.spec.vocab))
    requests = RequestSocket(zmq.Context.instance(), node.config.cluster.host)
    metrics = StepMetrics(Metrics(), len(node.spec.layers))
    threads = StepThreads(node.spec, node.welcome.threads, alone=not links)
    model = AttentionModel(node.spec, weights, kv)
    engine = Engine(model, experts, scheduler, pool, lanes, metrics, requests.send, threads)
    address = RequestAddress(node.name, requests.endpoint, pool.total * pool.block_size, node.max_context)
    try:
        controller.serving(request_address=address)
        AttentionService(node.config, engine, requests, links, controller).run()
    finally:
        for link in links.values():
            link.close()
        requests.close()


def _connect(node: NodeContext, peers: Sequence[LinkAddress]) -> dict[int, Link]:
    """One link to each FFN node, by its index in the placement."""
    options = node.link_options()
    return {node.placement.nodes.index(address.node): connect(address, options) for address in peers}


def _experts(
    node: NodeContext, checkpoint: Checkpoint, links: dict[int, Link], controller: ControllerClient
) -> LocalExperts | RemoteExperts:
    if links:
        return RemoteExperts(
            node.welcome.index,
            links,
            node.placement,
            node.welcome.fingerprint,
            node.device,
            node.config.exchange.wire,
            _token_split(node),
        )
    layers = load_expert_layers(
        checkpoint,
        node.spec,
        node.placement,
        0,
        node.dtype,
        node.device,
        controller.progress,
        node.config.model.quant,
    )
    return LocalExperts(layers, node.placement, node.device)


def _token_split(node: NodeContext) -> TokenSplit:
    if node.device.type == "cpu":
        return ExactSplit()
    nodes = len(node.placement.nodes)
    visits = [
        expected_visits(placed, nodes, layer.ffn.picks)
        for placed, layer in zip(node.placement.layers, node.spec.layers, strict=True)
    ]
    return BucketSplit(visits, node.config.exchange.bucket_slack)


def _pool(node: NodeContext, lanes: int) -> BlockPool:
    config = node.config
    most_tokens = lanes * config.scheduler.max_batch_requests * node.max_context
    sharers = config.cluster.attention_nodes
    blocks = plan_blocks(node.spec, config.kv_cache, node.dtype, node.device, sharers, most_tokens)
    return BlockPool(blocks, config.kv_cache.block_size)


if __name__ == "__main__":
    sys.exit(run_node("attention", serve))
