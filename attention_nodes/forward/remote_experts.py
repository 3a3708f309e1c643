"""Experts on other nodes: dispatch one layer of a lane, gather the partial sums, hand back their total.

A token goes once to each FFN node that holds one of its chosen slots; a node without tokens gets no message. Partial
sums are added in the order of nodes, not of arrival, so that a result does not depend on who answered first.

Legend: T tokens of the step, U tokens of one message, H hidden, K picks.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attention_nodes.forward.model import ExpertCall
from attention_nodes.forward.routing_table import routing_table
from attention_nodes.forward.token_split import ExactSplit, HostCounts, LayerTokens, Share, TokenSplit
from eplb import Placement
from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.header import SECOND_PART, Header, Kind, PayloadType, expect
from moe_runtime.protocol.payload import Frame, error_text, hidden_parts, payload_size, reply_part
from moe_runtime.transport.base import Link

_CPU = torch.device("cpu")


class ReplyError(ProtocolError):
    """A reply that ends the step of a lane under way; a plain ProtocolError is about no lane and ends the link."""

    def __init__(self, lane: int, message: str) -> None:
        super().__init__(message)
        self.lane = lane


@dataclass(slots=True)
class Sent:
    """One message under way: its header, and which rows of the layer it carries (None: all of them, in order)."""

    header: Header
    rows_U: Tensor | None
    partial_UH: Tensor | None = None
    busy_us: int = 0


@dataclass(slots=True)
class PendingLayer:
    """A layer that waits for its experts. The call is kept until all have answered."""

    call: ExpertCall
    tokens: LayerTokens
    since: float
    sent: dict[tuple[int, int], Sent] = field(default_factory=dict)  # by node and header flags
    left_over: HostCounts | None = None

    @property
    def complete(self) -> bool:
        return all(message.partial_UH is not None for message in self.sent.values())

    @property
    def silent(self) -> list[int]:
        """Nodes that have not answered yet."""
        return sorted({node for (node, _), message in self.sent.items() if message.partial_UH is None})

    @property
    def busy_s(self) -> float:
        """Seconds of expert computation that the layer waited for: its slowest node's."""
        return max(message.busy_us for message in self.sent.values()) / 1e6

    def total(self) -> Tensor:
        """Sum of the partial results, [T, H]."""
        y_TH: Tensor | None = None
        for _, message in sorted(self.sent.items()):
            part_UH = message.partial_UH
            assert part_UH is not None
            if message.rows_U is None:
                y_TH = part_UH if y_TH is None else y_TH + part_UH
            else:
                if y_TH is None:
                    y_TH = torch.zeros_like(self.call.x_TH)
                y_TH.index_add_(0, message.rows_U, part_UH)
        assert y_TH is not None
        return y_TH


class RemoteExperts:
    """All links of one attention node and what is under way on them, per lane."""

    def __init__(
        self,
        index: int,
        links: Mapping[int, Link],
        placement: Placement,
        fingerprint: int,
        device: torch.device = _CPU,
        wire: str = "same",
        split: TokenSplit | None = None,
    ) -> None:
        self._index = index
        self.links = dict(links)
        self._placement = placement
        self._fingerprint = fingerprint
        self._wire = wire
        self._split = split or ExactSplit()
        self._routes = routing_table(placement, device)
        self._pending: dict[int, PendingLayer] = {}
        # The least progress any FFN node last told of: where a lane that was idle joins in.
        self.clock_floor = 0
        # Steps that were given up while replies were still under way: those replies are not news.
        self._abandoned: dict[int, int] = {}

    @property
    def pending(self) -> Mapping[int, PendingLayer]:
        return self._pending

    def dispatch(self, lane: int, step: int, clock: int, call: ExpertCall) -> None:
        """Send a layer's tokens; the lane must have nothing pending. Raises LinkClosedError, LinkTimeoutError."""
        assert lane not in self._pending, f"lane {lane} already waits for experts"
        routes = self._routes[call.layer]
        slots_TK = routes.slots(call.experts_TK, call.replica_keys_T)
        payload = PayloadType.of(call.x_TH.dtype, self._wire)
        hidden = hidden_parts(call.x_TH, payload)
        tokens = LayerTokens(hidden, call.weights_TK, slots_TK, routes.node_of_slot_S[slots_TK])
        pending = self._pending[lane] = PendingLayer(call, tokens, time.monotonic())
        header = Header(
            Kind.DISPATCH,
            payload,
            self._index,
            lane,
            call.layer,
            self._placement.epoch,
            step,
            tokens=0,
            hidden=call.x_TH.shape[1],
            picks=slots_TK.shape[1],
            payload_bytes=0,
            clock=clock,
            fingerprint=self._fingerprint,
        )
        shares, pending.left_over = self._split.shares(call.layer, tokens, sorted(self.links))
        for share in shares:
            self._send(pending, share, header)

    def _send(self, pending: PendingLayer, share: Share, like: Header) -> None:
        header = replace(like, tokens=len(share.parts[0]), payload_bytes=payload_size(share.parts))
        pending.sent[share.node, header.flags] = Sent(header, share.rows_U)
        self.links[share.node].send(header, share.parts)

    def _send_left_over(self, pending: PendingLayer) -> None:
        """A second message to each node that more tokens visit than its bucket holds."""
        if pending.left_over is None:
            return
        left_over, pending.left_over = pending.left_over.read(), None
        for node, count in zip(sorted(self.links), left_over, strict=True):
            if count > 0:
                first = pending.sent[node, 0].header
                share = self._split.rest(first.layer, pending.tokens, node)
                self._send(pending, share, replace(first, flags=SECOND_PART))

    def accept(self, node: int, frame: Frame) -> int | None:
        """Take one reply; the lane whose layer is now complete, or None.

        Raises ReplyError, naming both values, when the reply does not answer what was sent, or is an error itself;
        ProtocolError when nothing was sent on that lane.
        """
        reply = frame.header
        if reply.step <= self._abandoned.get(reply.lane, -1):
            return None
        pending = self._pending.get(reply.lane)
        message = pending.sent.get((node, reply.flags)) if pending else None
        if pending is None or message is None:
            raise ProtocolError(f"reply for lane {reply.lane}, layer {reply.layer}, but nothing is under way there")
        sent = message.header
        try:
            if reply.kind is Kind.ERROR:
                raise ProtocolError(f"{self.links[node].peer} refused layer {sent.layer}: {error_text(frame)}")
            _check_reply(reply, sent)
            if message.partial_UH is not None:
                raise ProtocolError(f"{self.links[node].peer} answered lane {reply.lane}, layer {sent.layer} twice")
            message.partial_UH = reply_part(frame, pending.call.x_TH.dtype)
        except ProtocolError as error:
            raise ReplyError(reply.lane, str(error)) from error
        message.busy_us = reply.busy_us
        self.clock_floor = max(self.clock_floor, reply.clock)
        if pending.complete:
            self._send_left_over(pending)
        return reply.lane if pending.complete else None

    def finish(self, lane: int) -> PendingLayer:
        """Remove and return a lane's complete layer."""
        return self._pending.pop(lane)

    def abandon(self, lane: int, step: int) -> None:
        """Give up a lane's step: whatever is still answered for it will be dropped."""
        self._pending.pop(lane, None)
        self._abandoned[lane] = step


def _check_reply(reply: Header, sent: Header) -> None:
    expect("kind", reply.kind, Kind.REPLY)
    for name in ("sender", "step", "layer", "epoch", "tokens", "hidden", "payload", "fingerprint"):
        expect(f"reply {name} (lane {sent.lane}, layer {sent.layer})", getattr(reply, name), getattr(sent, name))
