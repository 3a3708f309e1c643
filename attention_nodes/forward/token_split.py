"""Which tokens of a layer go to which FFN node, and in how large a message.

On the CPU sizes are read from the tensors: each message is exactly as long as it must be, and a node without tokens
gets none. On a GPU reading a size would stop the host, so there a message has a fixed capacity, its bucket, which the
header names: what a node gets is known from the number of tokens alone. Places that stay empty have slot -1 in all
picks and cost nothing to compute. A node that more tokens visit than its bucket holds gets the others in a second
message, once the host has learned of them, which it does when it waits for replies anyway.

Legend: T tokens of the step, U tokens of one message, C a bucket's capacity, K picks, N nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eplb import LayerPlacement

_LEAST_BUCKET = 8
# Buckets from one power of two to the next: few sizes to compile and capture for, at most a fifth of a message empty.
_STEPS = 4


@dataclass(frozen=True, slots=True)
class Share:
    """One message's parts, and which rows of the layer they are (None: all of them, in order)."""

    node: int
    rows_U: Tensor | None
    parts: list[Tensor]


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """What there is to send: hidden states as they travel, weights, slots, and the node of each pick (-1: nobody)."""

    hidden: Sequence[Tensor]
    weights_TK: Tensor
    slots_TK: Tensor
    node_TK: Tensor

    def parts(self, node: int) -> list[Tensor]:
        """Every token's parts as `node` sees them: slots of other nodes are -1."""
        return [*self.hidden, torch.where(self.node_TK == node, self.slots_TK, -1).to(torch.int32), self.weights_TK]


class HostCounts:
    """Numbers on their way from a device to the host; `read` waits only if they have not arrived."""

    def __init__(self, counts_N: Tensor) -> None:
        self._counts_N = counts_N.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if counts_N.device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._counts_N.tolist()


class TokenSplit(Protocol):
    """How a layer's tokens become messages."""

    def shares(self, layer: int, tokens: LayerTokens, nodes: Sequence[int]) -> tuple[list[Share], HostCounts | None]:
        """The messages, and how many tokens of each of `nodes` did not fit (None: they always do)."""

    def rest(self, layer: int, tokens: LayerTokens, node: int) -> Share:
        """The second message of a node with tokens left over."""


class ExactSplit:
    """Messages as long as they must be; reads sizes from the tensors."""

    def shares(self, layer: int, tokens: LayerTokens, nodes: Sequence[int]) -> tuple[list[Share], None]:
        visited = nodes if len(nodes) == 1 else tokens.node_TK.unique().tolist()
        return [self._share(tokens, node) for node in visited if node >= 0], None

    def rest(self, layer: int, tokens: LayerTokens, node: int) -> Share:
        raise AssertionError("exact messages leave nothing over")

    def _share(self, tokens: LayerTokens, node: int) -> Share:
        visits_T = (tokens.node_TK == node).any(dim=1)
        if bool(visits_T.all()):
            return Share(node, None, tokens.parts(node))
        rows_U = visits_T.nonzero().squeeze(1)
        return Share(node, rows_U, [part[rows_U] for part in tokens.parts(node)])


class BucketSplit:
    """Messages of fixed capacity; nothing is read from the device.

    visits_LN: the share of a layer's tokens that is expected at each node; slack: how much more a bucket holds.
    """

    def __init__(self, visits_LN: Sequence[Sequence[float]], slack: float) -> None:
        self._visits_LN = visits_LN
        self._slack = slack

    def shares(self, layer: int, tokens: LayerTokens, nodes: Sequence[int]) -> tuple[list[Share], HostCounts | None]:
        total = len(tokens.slots_TK)
        capacities = [self._capacity(layer, total, node) if len(nodes) > 1 else total for node in nodes]
        shares = [self._cut(tokens, node, 0, capacity) for node, capacity in zip(nodes, capacities, strict=True)]
        if all(capacity == total for capacity in capacities):
            return shares, None
        nodes_N = torch.tensor(nodes, device=tokens.node_TK.device)
        visits_N = (tokens.node_TK.unsqueeze(-1) == nodes_N).any(dim=1).sum(dim=0)
        return shares, HostCounts(visits_N - torch.tensor(capacities, device=visits_N.device))

    def rest(self, layer: int, tokens: LayerTokens, node: int) -> Share:
        total = len(tokens.slots_TK)
        return self._cut(tokens, node, self._capacity(layer, total, node), total)

    def _capacity(self, layer: int, tokens: int, node: int) -> int:
        return min(tokens, bucket(math.ceil(tokens * self._visits_LN[layer][node] * self._slack)))

    @staticmethod
    def _cut(tokens: LayerTokens, node: int, first: int, end: int) -> Share:
        """The node's tokens number first..end - 1, in order, in a message of end - first places."""
        total, capacity = len(tokens.slots_TK), end - first
        *others, slots_TK, weights_TK = tokens.parts(node)
        if first == 0 and capacity == total:
            return Share(node, None, [*others, slots_TK, weights_TK])
        visits_T = (slots_TK >= 0).any(dim=1)
        place_T = visits_T.cumsum(0) - 1 - first
        # Tokens that are not in this message land on one place behind it, which is cut off.
        place_T = torch.where(visits_T & (place_T >= 0) & (place_T < capacity), place_T, capacity)
        rows_C = torch.full((capacity + 1,), -1, device=place_T.device)
        rows_C[place_T] = torch.arange(total, device=place_T.device)
        rows_C = rows_C[:capacity]
        slots_CK = torch.where(rows_C.unsqueeze(1) >= 0, slots_TK[rows_C], -1)
        rows_C = rows_C.clamp(min=0)
        return Share(node, rows_C, [*(part[rows_C] for part in others), slots_CK, weights_TK[rows_C]])


def bucket(rows: int) -> int:
    """The smallest bucket that holds so many rows."""
    size = _LEAST_BUCKET
    while size * 2 <= rows:
        size *= 2
    step = max(size // _STEPS, 1)
    return max(_LEAST_BUCKET, -(-rows // step) * step)


def expected_visits(placed: LayerPlacement, nodes: int, picks: int) -> list[float]:
    """Per node the share of tokens that will visit it, were all experts picked alike and independently."""
    there_EN = placed.slot_on_node_EN(nodes) >= 0
    here_N = (there_EN / there_EN.sum(axis=1, keepdims=True).clip(min=1)).mean(axis=0)
    return [float(1 - (1 - share) ** picks) for share in here_N]
