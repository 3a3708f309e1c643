"""uvicorn inside a process that has its own signals and its own idea of when to stop."""

import contextlib
import errno
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from moe_runtime.config import GatewayConfig
from moe_runtime.errors import ConfigError
from moe_runtime.gateway.http_protocol import GatewayProtocol
from moe_runtime.gateway.request_ids import MAX_HEAD_BYTES

_KEEP_ALIVE_S = 75


class HttpServer(uvicorn.Server):
    """Leaves SIGINT and SIGTERM to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, flush_s: float, idle_s: int = _KEEP_ALIVE_S) -> HttpServer:
    """A server for `serve(sockets=[...])`; after should_exit is set, open answers have flush_s to be sent.

    idle_s: how long a connection may be without a request, or without the rest of a request's head.
    """
    config = uvicorn.Config(
        app,
        http=GatewayProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        # A warning for every request that is no HTTP would let anybody fill the log.
        log_level="error",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=idle_s,
        timeout_graceful_shutdown=math.ceil(flush_s),
    )
    return HttpServer(config)


def bind(config: GatewayConfig) -> socket.socket:
    """Take the port without answering on it yet. Raises ConfigError if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"gateway.host {config.host!r} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "; gateway.port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        place = f"gateway.host {config.host} with gateway.port {config.port}"
        raise ConfigError(f"{place} cannot be bound: {error.strerror}{hint}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
