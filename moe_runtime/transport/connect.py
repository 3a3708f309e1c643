"""The connecting end: choose a transport for one FFN node, say hello, become a link."""

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path

import msgspec

from moe_runtime.errors import ConfigError, LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.protocol.control import LinkAddress
from moe_runtime.transport.base import Link, LinkHello
from moe_runtime.transport.channel import ChannelLink, PayloadPlane
from moe_runtime.transport.dist import build_plane
from moe_runtime.transport.handshake import (
    LENGTH,
    LinkOptions,
    check_agreement,
    decode_answer,
    encode_message,
    host_id,
    message_length,
)
from moe_runtime.transport.shm import RingPlane, create_memory, ring_capacity, send_with_memory
from moe_runtime.transport.tcp import prepare_tcp


def connect(address: LinkAddress, options: LinkOptions) -> Link:
    """A link to the FFN node at an address, within exchange.rendezvous_timeout_s.

    Raises ConfigError (the configured transport cannot work), ProtocolError (the two nodes disagree, names both
    values), LinkClosedError (nobody there) or LinkTimeoutError.
    """
    options.check()
    transport = choose_transport(address, options)
    hello = options.hello(transport, uuid.uuid4().hex)
    deadline = time.monotonic() + options.exchange.rendezvous_timeout_s
    try:
        return _connect(address, options, hello, deadline)
    except TimeoutError as error:
        waited = options.exchange.rendezvous_timeout_s
        raise LinkTimeoutError(f"no {transport} link to {address.node} within {waited} s") from error
    except OSError as error:
        place = _place(address, transport)
        raise LinkClosedError(f"no {transport} link to {address.node} at {place}: {error}") from error


def choose_transport(address: LinkAddress, options: LinkOptions) -> str:
    """shm, gloo or nccl: what the configuration forces, else shared memory on one host. Raises ConfigError."""
    forced = options.exchange.transport
    if options.device == "cuda":
        return "nccl"
    same_host = address.host_id == host_id() and Path(address.unix_path).exists()
    if forced == "shm" and not same_host:
        raise ConfigError(
            f"exchange.transport shm: {address.node} is on host {address.host_id} with socket {address.unix_path}, "
            f"not to be reached from this host, {host_id()}"
        )
    if forced == "auto":
        return "shm" if same_host else "gloo"
    return forced


def _connect(address: LinkAddress, options: LinkOptions, hello: LinkHello, deadline: float) -> Link:
    with contextlib.ExitStack() as undo:
        if hello.transport == "shm":
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(_left(deadline))
            sock.connect(address.unix_path)
        else:
            place = (address.tcp_host, address.tcp_port)
            sock = undo.enter_context(socket.create_connection(place, timeout=_left(deadline)))
            prepare_tcp(sock)
        connector = _shm_plane if hello.transport == "shm" else _group_plane
        plane, theirs = connector(sock, options, hello, deadline)
        undo.pop_all()
    return ChannelLink(sock, plane, options.terms(theirs))


def _shm_plane(
    sock: socket.socket, options: LinkOptions, hello: LinkHello, deadline: float
) -> tuple[PayloadPlane, LinkHello]:
    capacity = ring_capacity(options.max_payload_bytes, options.exchange.lanes)
    memory = create_memory(capacity)
    try:
        send_with_memory(sock, encode_message(hello), memory)
        theirs = _read_answer(sock, hello, deadline)
        return RingPlane(memory, 0, capacity, sock, options.exchange.reply_timeout_s), theirs
    finally:
        os.close(memory)


def _group_plane(
    sock: socket.socket, options: LinkOptions, hello: LinkHello, deadline: float
) -> tuple[PayloadPlane, LinkHello]:
    sock.sendall(encode_message(hello))
    theirs = _read_answer(sock, hello, deadline)
    return build_plane(sock, 0, hello.link_id, hello.transport, options), theirs


def _read_answer(sock: socket.socket, hello: LinkHello, deadline: float) -> LinkHello:
    length = message_length(_read(sock, LENGTH.size, deadline))
    try:
        answer = decode_answer(_read(sock, length, deadline))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer's answer is no link answer: {error}") from error
    if answer.hello is None:
        raise ProtocolError(answer.refusal)
    check_agreement(hello, answer.hello)
    return answer.hello


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(_left(deadline))
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise LinkClosedError("the peer hung up during the handshake")
        data += chunk
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _place(address: LinkAddress, transport: str) -> str:
    return address.unix_path if transport == "shm" else f"{address.tcp_host}:{address.tcp_port}"
