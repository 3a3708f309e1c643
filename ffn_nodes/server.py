"""An FFN node's work: check messages, merge them by layer, compute once, answer each. Knows links, no sockets.

Stateless between messages but for weights and counters: whatever an attention node needs to try again, it still has.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ffn_nodes.gather import Arrival, GatherQueue
from ffn_nodes.load import ExpertLoad
from moe_runtime.errors import LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.models.expert_layers import ExpertLayer
from moe_runtime.models.spec import ModelSpec
from moe_runtime.protocol.header import Header, Kind, PayloadType, expect
from moe_runtime.protocol.payload import Frame, dispatch_parts, error_reply, hidden_parts, payload_size, slots_part
from moe_runtime.transport.base import Link


class ExpertServer:
    """Serves one node's expert layers. One thread."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[ExpertLayer],
        dtype: torch.dtype,
        epoch: int,
        fingerprint: int,
        queue: GatherQueue,
        wire: str = "same",
    ) -> None:
        self._spec = spec
        self._layers = layers
        self._dtype = dtype
        self._payload = PayloadType.of(dtype, wire)
        self._epoch = epoch
        self._fingerprint = fingerprint
        self.queue = queue
        self.load = ExpertLoad(spec)
        self._progress: dict[Link, dict[int, tuple[int, int, int]]] = {}
        self._floor = 0

    def receive(self, link: Link, frame: Frame) -> None:
        """Queue a message, or answer it with an error that names both values. Raises LinkClosedError,
        LinkTimeoutError.
        """
        try:
            self._check(link, frame)
        except ProtocolError as error:
            link.send(*error_reply(frame.header, str(error)))
            raise
        self.queue.add(Arrival(frame, link, time.monotonic()))

    def serve(self) -> list[Link]:
        """Compute and answer the next group, if the policy has one; returns links that turned out dead."""
        group = self.queue.take(time.monotonic())
        if not group:
            return []
        start = time.perf_counter()
        layer = group[0].frame.header.layer
        parts = [dispatch_parts(arrival.frame, self._dtype) for arrival in group]
        x_TH, slots_TK, weights_TK = (
            torch.cat(column) if len(group) > 1 else column[0] for column in zip(*parts, strict=True)
        )
        y_TH = self._layers[layer](x_TH, slots_TK, weights_TK)
        seconds = time.perf_counter() - start
        self._floor = min(arrival.frame.header.clock for arrival in group)
        dead = self._answer(group, y_TH, int(seconds * 1e6))
        self.load.count(layer, self._layers[layer], slots_TK, len(group), seconds)
        return dead

    def forget(self, link: Link) -> None:
        """Drop everything that a closed link asked for."""
        self.queue.drop(link)
        self._progress.pop(link, None)

    def _answer(self, group: Sequence[Arrival], y_TH: torch.Tensor, busy_us: int) -> list[Link]:
        floor = self.queue.clock_floor()
        floor = self._floor if floor is None else min(floor, self._floor)
        dead, row = [], 0
        for arrival in group:
            request = arrival.frame.header
            parts = hidden_parts(y_TH[row : row + request.tokens], self._payload)
            row += request.tokens
            header = replace(
                request, kind=Kind.REPLY, picks=0, payload_bytes=payload_size(parts), clock=floor, busy_us=busy_us
            )
            try:
                arrival.link.send(header, parts)
            except (LinkClosedError, LinkTimeoutError):
                dead.append(arrival.link)
        return dead

    def _check(self, link: Link, frame: Frame) -> None:
        header = frame.header
        expect("kind", header.kind, Kind.DISPATCH)
        expect("model fingerprint", header.fingerprint, self._fingerprint)
        expect("placement epoch", header.epoch, self._epoch)
        expect("sender", header.sender, link.peer_index)
        if header.layer >= len(self._layers):
            raise ProtocolError(
                f"layer mismatch: the message says {header.layer}, this model has 0..{len(self._layers) - 1}"
            )
        expect("hidden size", header.hidden, self._spec.hidden)
        expect("picks per token", header.picks, self._spec.layers[header.layer].ffn.picks)
        expect("payload type", header.payload.name, self._payload.name)
        if header.tokens == 0:
            raise ProtocolError("token count mismatch: the message says 0, an empty message must not be sent")
        self._check_progress(link, header)
        slots_TK = slots_part(frame)
        if slots_TK.device.type == "cpu":
            self._layers[header.layer].check(slots_TK.numpy())
        # Only a message that is served counts: what was refused may come again, put right.
        self._progress.setdefault(link, {})[header.lane] = header.step, header.layer, header.flags

    def _check_progress(self, link: Link, header: Header) -> None:
        now = header.step, header.layer, header.flags
        last = self._progress.get(link, {}).get(header.lane, (-1, -1, 0))
        if now <= last:
            raise ProtocolError(
                f"step and layer mismatch: lane {header.lane} says step {now[0]} layer {now[1]}, "
                f"but this node has served its step {last[0]} layer {last[1]}"
            )
