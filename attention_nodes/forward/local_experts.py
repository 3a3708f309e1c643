"""Experts in the same process (unsplit mode): the same call, answered at once. The yardstick for the exchange."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_nodes.forward.model import ExpertCall
from attention_nodes.forward.routing_table import routing_table
from eplb import Placement
from moe_runtime.models.expert_layers import ExpertLayer


class LocalExperts:
    """All experts of all layers."""

    def __init__(self, layers: Sequence[ExpertLayer], placement: Placement, device: torch.device) -> None:
        self._layers = layers
        self._routes = routing_table(placement, device)

    def __call__(self, call: ExpertCall) -> Tensor:
        slots_TK = self._routes[call.layer].slots(call.experts_TK, call.replica_keys_T)
        return self._layers[call.layer](call.x_TH, slots_TK, call.weights_TK)
