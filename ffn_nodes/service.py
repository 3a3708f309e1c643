"""An FFN node's event loop: links, messages, control; one thread, one poll set."""

import logging
import time

import zmq

from ffn_nodes.server import ExpertServer
from moe_runtime.cluster.controller_client import ControllerClient
from moe_runtime.config import Config
from moe_runtime.errors import LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.protocol.control import Shutdown
from moe_runtime.transport.base import Link, Listener

log = logging.getLogger(__name__)


class FfnService:
    """Drives an ExpertServer until told to shut down."""

    def __init__(self, config: Config, server: ExpertServer, listener: Listener, control: ControllerClient) -> None:
        self._config = config
        self._server = server
        self._listener = listener
        self._control = control
        self._links: dict[int, Link] = {}
        self._drain_until: float | None = None
        self._poller = zmq.Poller()
        self._poller.register(control.socket, zmq.POLLIN)
        self._poller.register(listener.fileno(), zmq.POLLIN)

    def run(self) -> None:
        """Until Shutdown and every link is closed by its attention node, or drain_timeout_s is over."""
        try:
            while not self._stopped():
                for source, _ in self._poller.poll(self._timeout_ms()):
                    self._handle(source)
                for link in self._server.serve():
                    self._close(link, "it takes no reply")
                if self._control.heartbeat_due():
                    self._control.heartbeat(self._server.load.samples())
        finally:
            for link in self._links.values():
                link.close()

    def _timeout_ms(self) -> int:
        wait_s = self._server.queue.wait_s(time.monotonic())
        bound_s = self._config.cluster.heartbeat_s
        # Whatever is queued is served after one look at what else has arrived: merging costs no waiting.
        return int(1000 * (bound_s if wait_s is None else min(wait_s, bound_s)))

    def _handle(self, source: object) -> None:
        if source is self._control.socket:
            self._take_control()
        elif source == self._listener.fileno():
            while (link := self._listener.accept()) is not None:
                log.info("link to %s over %s", link.peer, link.transport)
                self._links[link.fileno()] = link
                self._poller.register(link.fileno(), zmq.POLLIN)
        else:
            assert isinstance(source, int)
            self._take_messages(self._links[source])

    def _take_messages(self, link: Link) -> None:
        try:
            while (frame := link.receive()) is not None:
                try:
                    self._server.receive(link, frame)
                except ProtocolError as error:
                    log.error("refused a message of %s: %s", link.peer, error)
        except (LinkClosedError, LinkTimeoutError, ProtocolError) as error:
            self._close(link, str(error))

    def _close(self, link: Link, why: str) -> None:
        fd = link.fileno()
        if self._links.pop(fd, None) is None:
            return
        log.info("link to %s is closed: %s", link.peer, why)
        self._poller.unregister(fd)
        self._server.forget(link)
        link.close()

    def _take_control(self) -> None:
        for message in self._control.poll():
            if isinstance(message, Shutdown) and self._drain_until is None:
                self._drain_until = time.monotonic() + self._config.cluster.drain_timeout_s

    def _stopped(self) -> bool:
        if self._drain_until is None:
            return False
        return not self._links or time.monotonic() > self._drain_until
