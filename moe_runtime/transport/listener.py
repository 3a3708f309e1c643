"""The accepting end: takes Unix and TCP connections, one pollable descriptor for all of them.

Handshakes advance only when bytes are there, so that a peer that says nothing, or garbage, holds up nobody; joining a
process group waits for the peer, so it happens on a thread of its own.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from pathlib import Path

from moe_runtime.errors import ConfigError, ProtocolError
from moe_runtime.protocol.control import LinkAddress
from moe_runtime.transport.base import Link, LinkHello, Listener
from moe_runtime.transport.channel import ChannelLink
from moe_runtime.transport.dist import build_plane
from moe_runtime.transport.greeting import Greeting
from moe_runtime.transport.handshake import Answer, LinkOptions, check_agreement, encode_message, host_id
from moe_runtime.transport.tcp import prepare_tcp

_BACKLOG = 128
_MAX_GREETINGS = 128
_MAX_UNIX_PATH = 107

log = logging.getLogger(__name__)


class LinkListener(Listener):
    """Listens on a Unix socket and, on a free port of tcp_host, over TCP; `address` says where.

    Raises ConfigError when the path is too long for a Unix socket or the configured transport cannot work here.
    """

    def __init__(self, options: LinkOptions, unix_path: Path, tcp_host: str) -> None:
        options.check()
        self._options, self._unix_path = options, unix_path
        self._unix = _listen_unix(unix_path)
        self._tcp = socket.create_server((tcp_host, 0), backlog=_BACKLOG, family=_family(tcp_host))
        self._ready: deque[Link] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._greetings: dict[int, Greeting] = {}
        self._selector = selectors.DefaultSelector()
        for sock, server in ((self._unix, self._unix), (self._tcp, self._tcp), (self._wake_in, None)):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, server)
        self._lock = threading.Lock()
        self._closed = False
        self.address = LinkAddress(options.node, host_id(), str(unix_path), tcp_host, self._tcp.getsockname()[1])

    def fileno(self) -> int:
        return self._selector.fileno()

    def accept(self) -> Link | None:
        for key, _ in self._selector.select(0):
            if key.data is not None:
                self._greet(key.data)
            elif key.fd in self._greetings:
                self._hear(self._greetings[key.fd])
        self._drop_overdue()
        return self._take_ready()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for greeting in list(self._greetings.values()):
            self._drop(greeting)
        while (link := self._take_ready()) is not None:
            link.close()
        self._selector.close()
        for sock in (self._unix, self._tcp, self._wake_in, self._wake_out):
            sock.close()
        self._unix_path.unlink(missing_ok=True)

    def _greet(self, server: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = server.accept()
            sock.setblocking(False)
            if server is self._tcp:
                prepare_tcp(sock)
            deadline = time.monotonic() + self._options.exchange.rendezvous_timeout_s
            self._greetings[sock.fileno()] = Greeting(sock, server is self._unix, deadline)
            self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, greeting: Greeting) -> None:
        try:
            hello = greeting.hear()
            if hello is not None:
                self._agree(greeting, hello)
        except ProtocolError as error:
            log.warning("link refused: %s", error)
            greeting.refuse(str(error))
            self._drop(greeting)
        except OSError as error:
            log.info("a connection ended during the handshake: %s", error)
            self._drop(greeting)

    def _agree(self, greeting: Greeting, hello: LinkHello) -> None:
        options = self._options
        mine = options.hello(self._expected_transport(greeting), hello.link_id)
        check_agreement(mine, hello)
        if hello.transport == "shm":
            plane = greeting.map_memory(options)
            greeting.sock.sendall(encode_message(Answer(mine)))
            self._forget(greeting)
            self._add(ChannelLink(greeting.sock, plane, options.terms(hello)))
        else:
            greeting.sock.sendall(encode_message(Answer(mine)))
            self._forget(greeting)
            threading.Thread(target=self._join, args=(greeting.sock, hello), daemon=True).start()

    def _expected_transport(self, greeting: Greeting) -> str:
        """What the configuration forces, else what fits the kind of socket."""
        forced = self._options.exchange.transport
        if forced != "auto":
            return forced
        if greeting.unix:
            return "shm"
        return "nccl" if self._options.device == "cuda" else "gloo"

    def _join(self, sock: socket.socket, hello: LinkHello) -> None:
        """On a thread: meet the peer in a process group."""
        try:
            plane = build_plane(sock, 1, hello.link_id, hello.transport, self._options)
        except OSError as error:
            log.warning("no link from %s: %s", hello.node, error)
            sock.close()
            return
        self._add(ChannelLink(sock, plane, self._options.terms(hello)))

    def _add(self, link: Link) -> None:
        with self._lock:
            if not self._closed:
                self._ready.append(link)
                self._wake_out.send(b"!")
                return
        link.close()

    def _take_ready(self) -> Link | None:
        """One wake-up byte a link, so that fileno() stays readable while links wait."""
        try:
            self._wake_in.recv(1)
        except BlockingIOError:
            return None
        return self._ready.popleft()

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        surplus = len(self._greetings) - _MAX_GREETINGS
        for i, greeting in enumerate(list(self._greetings.values())):
            if greeting.deadline < now or i < surplus:
                self._drop(greeting)

    def _forget(self, greeting: Greeting) -> None:
        self._selector.unregister(greeting.sock)
        del self._greetings[greeting.sock.fileno()]

    def _drop(self, greeting: Greeting) -> None:
        self._forget(greeting)
        greeting.close()


def _listen_unix(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_UNIX_PATH:
        raise ConfigError(f"Unix socket path of {len(os.fsencode(path))} bytes, at most {_MAX_UNIX_PATH}: {path}")
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(_BACKLOG)
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
