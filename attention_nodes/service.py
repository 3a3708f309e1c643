"""An attention node's event loop: requests, tokens, replies from FFN nodes, control; one thread, one poll set."""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq

from attention_nodes.engine import Engine
from attention_nodes.scheduling.request import Request, replica_key
from attention_nodes.scheduling.scheduler import Answer
from moe_runtime.cluster.controller_client import ControllerClient
from moe_runtime.config import Config
from moe_runtime.errors import OverloadedError, RequestError
from moe_runtime.protocol import messages
from moe_runtime.protocol.control import Shutdown
from moe_runtime.protocol.messages import Abort, RequestFailed, StepOutputs, Submit, TokenOutput
from moe_runtime.transport.base import Link

log = logging.getLogger(__name__)


class RequestSocket:
    """The ROUTER that gateways connect to."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", host: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.linger = 1000
        # A ROUTER drops messages beyond its mark without a word; a token must never be lost to a gateway's stall.
        self.socket.set_hwm(0)
        self.endpoint = f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}')}"

    def receive(self) -> list[tuple[bytes, messages.ToAttention]]:
        """All that has arrived, with the sender; what cannot be read is logged and dropped."""
        received = []
        while self.socket.poll(0):
            client, *frames = self.socket.recv_multipart()
            try:
                (body,) = frames
                received.append((client, messages.decode_to_attention(body)))
            except (ValueError, msgspec.MsgspecError) as error:
                log.error("dropped an unreadable message from %r: %s", client, error)
        return received

    def send(self, answers: list[tuple[bytes, Answer]]) -> None:
        """One message per client and step; a client that is gone gets nothing."""
        outputs: dict[bytes, list[TokenOutput]] = defaultdict(list)
        for client, answer in answers:
            if isinstance(answer, RequestFailed):
                self.socket.send_multipart([client, messages.encode(answer)])
            else:
                outputs[client].append(answer)
        for client, step in outputs.items():
            self.socket.send_multipart([client, messages.encode(StepOutputs(tuple(step)))])

    def close(self) -> None:
        self.socket.close()


class AttentionService:
    """Drives an engine until told to shut down."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        requests: RequestSocket,
        links: Mapping[int, Link],
        control: ControllerClient,
    ) -> None:
        self._config = config
        self._engine = engine
        self._requests = requests
        self._links = links
        self._control = control
        self._node_of_fd = {link.fileno(): node for node, link in links.items()}
        self._arrivals = 0
        self._drain_until: float | None = None
        self._poller = zmq.Poller()
        self._poller.register(requests.socket, zmq.POLLIN)
        self._poller.register(control.socket, zmq.POLLIN)
        for fd in self._node_of_fd:
            self._poller.register(fd, zmq.POLLIN)

    def run(self) -> None:
        """Until Shutdown and all requests are done, or drain_timeout_s is over.

        Raises LinkClosedError, LinkTimeoutError, ProtocolError when the exchange breaks.
        """
        while not self._stopped():
            self._engine.run_ready()
            # After a lane has finished and before the wait: the wait must not sleep over work that is there.
            self._engine.start_idle_lanes()
            self._handle(self._wait())
            if self._control.heartbeat_due():
                self._engine.refresh_gauges()
                self._control.heartbeat(self._engine.metrics.registry.snapshot())
                self._engine.check_replies(self._config.exchange.reply_timeout_s)

    def _wait(self) -> list[tuple[Any, int]]:
        if self._engine.has_ready:
            return self._poller.poll(0)
        start = time.perf_counter()
        events = self._poller.poll(int(self._config.cluster.heartbeat_s * 1000))
        if self._engine.in_flight:
            self._engine.metrics.bubble.add(time.perf_counter() - start)
        return events

    def _handle(self, events: list[tuple[Any, int]]) -> None:
        for source, _ in events:
            if source is self._requests.socket:
                self._take_requests()
            elif source is self._control.socket:
                self._take_control()
            else:
                assert isinstance(source, int)
                self._take_replies(self._node_of_fd[source])

    def _take_replies(self, node: int) -> None:
        while (frame := self._links[node].receive()) is not None:
            self._engine.accept(node, frame)

    def _take_control(self) -> None:
        for message in self._control.poll():
            if isinstance(message, Shutdown) and self._drain_until is None:
                self._drain_until = time.monotonic() + self._config.cluster.drain_timeout_s

    def _take_requests(self) -> None:
        for client, message in self._requests.receive():
            match message:
                case Submit():
                    self._submit(client, message)
                case Abort():
                    self._engine.scheduler.abort(message.request_id)

    def _submit(self, client: bytes, message: Submit) -> None:
        request = Request(
            message.request_id,
            client,
            list(message.prompt_ids),
            len(message.prompt_ids) - message.resumed,
            message.sampling,
            self._arrivals,
            replica_key(message.request_id),
        )
        self._arrivals += 1
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._requests.send([(client, RequestFailed(message.request_id, "invalid", str(error)))])
        except OverloadedError as error:
            self._requests.send([(client, RequestFailed(message.request_id, "overloaded", str(error)))])

    def _stopped(self) -> bool:
        if self._drain_until is None:
            return False
        return self._engine.drained or time.monotonic() > self._drain_until
