"""What both tensor roles do at start: arguments, life tied to the launcher, the controller's Welcome, a loud end on
errors.
"""

import argparse
import logging
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from eplb import Placement, round_robin
from moe_runtime.cluster.controller_client import ControllerClient
from moe_runtime.cluster.process import die_with_parent, pin
from moe_runtime.config import Config
from moe_runtime.models.spec import ModelSpec
from moe_runtime.protocol.control import Role, Welcome
from moe_runtime.protocol.header import ALIGNMENT
from moe_runtime.protocol.placement_codec import placement_from_message
from moe_runtime.transport.handshake import LinkOptions


@dataclass(frozen=True)
class NodeContext:
    """All that a node knows once it is welcome. `placement` covers one local node in unsplit mode."""

    name: str
    welcome: Welcome
    config: Config
    spec: ModelSpec
    placement: Placement
    dtype: torch.dtype
    device: torch.device

    @property
    def max_context(self) -> int:
        return self.config.scheduler.max_context or self.spec.max_context

    def link_options(self) -> LinkOptions:
        config, welcome = self.config, self.welcome
        return LinkOptions(
            node=self.name,
            index=welcome.index,
            fingerprint=welcome.fingerprint,
            dtype=config.model.dtype,
            max_payload_bytes=max_payload_bytes(self.spec, config.scheduler.max_batch_tokens, self.dtype),
            exchange=config.exchange,
            device=config.cluster.device,
            store_host=welcome.store_host,
            store_port=welcome.store_port,
        )


def max_payload_bytes(spec: ModelSpec, tokens: int, dtype: torch.dtype) -> int:
    """The largest message of a step of `tokens` tokens: hidden states, slots and weights of one layer."""
    picks = max(layer.ffn.picks for layer in spec.layers)
    return tokens * (spec.hidden * dtype.itemsize + picks * 8) + 3 * ALIGNMENT


def node_context(name: str, welcome: Welcome) -> NodeContext:
    config = welcome.config
    spec = msgspec.msgpack.decode(welcome.spec, type=ModelSpec)
    if welcome.placement is None:
        placement = round_robin(spec.experts, (name,))
    else:
        placement = placement_from_message(welcome.placement)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]
    return NodeContext(name, welcome, config, spec, placement, dtype, torch.device(config.cluster.device))


def run_node(role: Role, serve: Callable[[NodeContext, ControllerClient], None]) -> int:
    """Run one node process to its end; returns the exit code. A failure is logged and told to the controller."""
    arguments = _arguments(role)
    # Ctrl-C is the launcher's to handle; it tells the nodes to drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {arguments.node} %(levelname)s %(message)s")
    with ControllerClient(arguments.node, arguments.controller) as controller:
        try:
            welcome = controller.hello(role)
            pin(welcome.cores)
            torch.set_num_threads(welcome.threads)
            serve(node_context(arguments.node, welcome), controller)
        except Exception as error:  # noqa: BLE001 - whatever it is, the controller must hear of it
            traceback.print_exc()
            controller.fatal(f"{type(error).__name__}: {error}")
            return 1
    return 0


def _arguments(role: Role) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"One {role} node. The launcher starts it; example: --node x0 --controller tcp://127.0.0.1:5555"
    )
    parser.add_argument("--node", required=True, help="this node's name")
    parser.add_argument("--controller", required=True, help="the controller's ZeroMQ endpoint")
    return parser.parse_args()
