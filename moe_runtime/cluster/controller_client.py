"""A node's line to the controller: the start-up calls wait, everything after is non-blocking.

with ControllerClient(arguments.node, arguments.controller) as controller:
    welcome = controller.hello("ffn")
    ...
    poller.register(controller.socket, zmq.POLLIN)   # then controller.poll() when it is readable
"""

import os
import time
from collections.abc import Sequence
from types import TracebackType

import zmq

from moe_runtime.config import Config
from moe_runtime.errors import LinkTimeoutError, ProtocolError
from moe_runtime.protocol import control
from moe_runtime.protocol.control import (
    Fatal,
    FromController,
    Heartbeat,
    Hello,
    LinkAddress,
    Listening,
    Peers,
    Progress,
    RequestAddress,
    Role,
    Sample,
    Serving,
    ToController,
    Welcome,
)

# The controller listens before it starts a node, so that it answers a Hello at once; then its configuration rules.
_WELCOME_TIMEOUT_S = 60.0
_CLOSE_LINGER_MS = 1000


class ControllerClient:
    """One ZeroMQ DEALER whose identity is the node's name. For one thread."""

    def __init__(self, node: str, endpoint: str, context: "zmq.Context[zmq.Socket[bytes]] | None" = None) -> None:
        self.node = node
        self.endpoint = endpoint
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.identity = node.encode()
        self.socket.linger = _CLOSE_LINGER_MS
        self.socket.connect(endpoint)
        self._config: Config | None = None
        self._next_heartbeat = 0.0

    def hello(self, role: Role) -> Welcome:
        """Introduce this process. Raises LinkTimeoutError without an answer, ProtocolError on another message."""
        self._send(Hello(self.node, role, os.getpid()))
        message = self._receive(_WELCOME_TIMEOUT_S, "a Welcome")
        if not isinstance(message, Welcome):
            raise ProtocolError(f"{self.node} expected Welcome from the controller, got {type(message).__name__}")
        self._config = message.config
        return message

    def progress(self, fraction: float, what: str) -> None:
        """Tell how far loading has come, 0..1."""
        self._send(Progress(self.node, fraction, what))

    def listening(self, address: LinkAddress) -> None:
        """An FFN node accepts links from now on."""
        self._send(Listening(address))

    def wait_peers(self, timeout_s: float | None = None) -> Peers:
        """Whom to connect to; waits for slower nodes, startup_timeout_s unless told otherwise.

        Raises LinkTimeoutError when they take longer, ProtocolError on another message.
        """
        assert self._config is not None, "hello() comes first"
        limit = self._config.cluster.startup_timeout_s if timeout_s is None else timeout_s
        message = self._receive(limit, "the peers' addresses")
        if not isinstance(message, Peers):
            raise ProtocolError(f"{self.node} expected Peers from the controller, got {type(message).__name__}")
        return message

    def serving(self, request_address: RequestAddress | None = None, url: str | None = None) -> None:
        """Ready; attention nodes give their request address, the gateway its URL."""
        self._send(Serving(self.node, request_address, url))

    def heartbeat_due(self) -> bool:
        """True once every heartbeat_s; a caller that then sends one needs no clock of its own."""
        assert self._config is not None, "hello() comes first"
        now = time.monotonic()
        if now < self._next_heartbeat:
            return False
        self._next_heartbeat = now + self._config.cluster.heartbeat_s
        return True

    def heartbeat(self, samples: Sequence[Sample] = ()) -> None:
        """Alive, with current metrics."""
        self._send(Heartbeat(self.node, tuple(samples)))

    def fatal(self, message: str) -> None:
        """This process cannot go on; the launch ends with `message`. Delivered by close(), also without a reader."""
        self._send(Fatal(self.node, message))

    def poll(self) -> list[FromController]:
        """All messages that have arrived; never waits."""
        messages = []
        while self.socket.poll(0):
            messages.append(control.decode_from_controller(self.socket.recv()))
        return messages

    def fileno(self) -> int:
        """ZeroMQ's edge-triggered descriptor, for event loops: after a wake-up, and after every send, call poll()."""
        return self.socket.fileno()

    def close(self) -> None:
        """Deliver what was sent (for at most a second) and release the socket. May be called twice."""
        self.socket.close()
        if self._owns_context:
            self._context.term()

    def __enter__(self) -> "ControllerClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: ToController) -> None:
        try:
            self.socket.send(control.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise LinkTimeoutError(f"{self.node}: the controller at {self.endpoint} takes no messages") from error

    def _receive(self, timeout_s: float, what: str) -> FromController:
        if not self.socket.poll(int(timeout_s * 1000)):
            raise LinkTimeoutError(f"{self.node} waited {timeout_s:g} s for {what} from the controller {self.endpoint}")
        return control.decode_from_controller(self.socket.recv())
