"""The controller's socket: one ROUTER that every node connects to; what to answer is Membership's to say."""

import logging
import time
from types import TracebackType

import msgspec
import zmq

from moe_runtime.cluster.membership import Membership, Stage
from moe_runtime.errors import ProtocolError
from moe_runtime.protocol import control
from moe_runtime.protocol.control import FromController, Role, Shutdown

log = logging.getLogger(__name__)


class Controller:
    """Owns the socket and drives a Membership; the launcher calls step() in its loop. For one thread."""

    def __init__(self, host: str, heartbeat_s: float) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"tcp://{host}:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._heartbeat_s = heartbeat_s
        self._next_stats = 0.0

    def step(self, membership: Membership, wait_ms: int) -> None:
        """Wait for messages, at most wait_ms, answer all that are here, and send due statistics to the gateway.

        Raises ProtocolError when a node breaks the protocol.
        """
        if self._socket.poll(wait_ms):
            while self._socket.poll(0):
                self._answer(membership)
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + self._heartbeat_s
            stats = membership.stats(now)
            for member in membership.members.values():
                if member.plan.role == "gateway" and member.stage is Stage.SERVING:
                    self._send(member.plan.name, stats)

    def shut_down(self, membership: Membership, role: Role) -> None:
        """Tell the nodes of one role to finish and exit."""
        for member in membership.members.values():
            if member.plan.role == role:
                self._send(member.plan.name, Shutdown())

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def __enter__(self) -> "Controller":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, membership: Membership) -> None:
        identity, *frames = self._socket.recv_multipart()
        sender = identity.decode(errors="replace")
        if sender not in membership.members or len(frames) != 1:
            log.warning("ignored a message from %r, which is no node of this cluster", sender)
            return
        try:
            message = control.decode_to_controller(frames[0])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{sender} sent a message that cannot be read: {error}") from error
        for node, answer in membership.hear(sender, message, time.monotonic()):
            self._send(node, answer)

    def _send(self, node: str, message: FromController) -> None:
        # A ROUTER drops what is meant for a peer that is gone: its death is the supervisor's to notice.
        self._socket.send_multipart([node.encode(), control.encode(message)])
