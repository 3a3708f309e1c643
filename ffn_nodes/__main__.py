"""`python -m ffn_nodes`: load this node's experts, accept links, serve until told to stop."""

import sys
from pathlib import Path

from ffn_nodes.gather import GatherQueue
from ffn_nodes.server import ExpertServer
from ffn_nodes.service import FfnService
from moe_runtime.cluster.controller_client import ControllerClient
from moe_runtime.cluster.node_main import NodeContext, run_node
from moe_runtime.cluster.process import yield_to_others
from moe_runtime.models.expert_layers import ExpertLayer, load_expert_layers
from moe_runtime.models.heap import trim_heap
from moe_runtime.models.loader import open_checkpoint
from moe_runtime.transport.listener import LinkListener


def serve(node: NodeContext, controller: ControllerClient) -> None:
    yield_to_others()
    layers = _load(node, controller)
    trim_heap()
    exchange = node.config.exchange
    server = ExpertServer(
        node.spec,
        layers,
        node.dtype,
        node.placement.epoch,
        node.welcome.fingerprint,
        GatherQueue(exchange.gather, exchange.gather_window_us),
        exchange.wire,
    )
    socket_path = Path(node.welcome.run_dir) / f"{node.name}.sock"
    listener = LinkListener(node.link_options(), socket_path, node.config.cluster.host)
    try:
        controller.listening(listener.address)
        controller.serving()
        FfnService(node.config, server, listener, controller).run()
    finally:
        listener.close()


def _load(node: NodeContext, controller: ControllerClient) -> tuple[ExpertLayer, ...]:
    """This node's experts; the checkpoint's files are closed afterwards."""
    return load_expert_layers(
        open_checkpoint(Path(node.welcome.model_dir), node.spec),
        node.spec,
        node.placement,
        node.placement.nodes.index(node.name),
        node.dtype,
        node.device,
        controller.progress,
        node.config.model.quant,
    )


if __name__ == "__main__":
    sys.exit(run_node("ffn", serve))
