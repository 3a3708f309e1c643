"""Links come to be, or are refused for a reason that names both values, and no stranger holds up the listener."""

import gc
import os
import queue
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import TCPStore
from transport_peers import MAX_PAYLOAD, PATIENCE_S, options, random_bytes, receive, send_bytes

from moe_runtime.errors import ConfigError, LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.protocol.control import LinkAddress
from moe_runtime.transport import Link, LinkListener, LinkOptions, connect, handshake, host_id
from moe_runtime.transport.connect import choose_transport
from moe_runtime.transport.handshake import LENGTH, MAX_MESSAGE_BYTES, Answer, encode_message
from moe_runtime.transport.inproc import link_pair

PROCESSES = ("shm", "gloo")


@pytest.fixture(scope="module")
def store_port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


class Node:
    """An FFN node's listener and, unless idle, the loop that accepts on a thread."""

    def __init__(self, theirs: LinkOptions, unix_path: Path, idle: bool) -> None:
        self.listener = LinkListener(theirs, unix_path, "127.0.0.1")
        self.address = self.listener.address
        self._links: queue.Queue[Link] = queue.Queue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        if not idle:
            self._thread.start()

    def link(self) -> Link:
        return self._links.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self.listener.close()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self.listener.fileno(), select.POLLIN)
        while not self._stopping.is_set():
            poller.poll(20)
            link = self.listener.accept()
            if link is not None:
                self._links.put(link)


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(theirs: LinkOptions, idle: bool = False) -> Node:
        nodes.append(Node(theirs, tmp_path / f"ffn{len(nodes)}.sock", idle))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


def check_works(near: Link, far: Link) -> None:
    data = random_bytes(1024, 0)
    send_bytes(near, data)
    send_bytes(far, data)
    assert torch.equal(receive(far).payload, data) and torch.equal(receive(near).payload, data)


def new_link(node: Node, mine: LinkOptions, address: LinkAddress | None = None) -> tuple[Link, Link]:
    return connect(address or node.address, mine), node.link()


MISMATCHES = [
    ("fingerprint", 1, f"fingerprint mismatch: attention0 says 1, ffn0 has {0xFEED}"),
    ("dtype", "bfloat16", "dtype mismatch: attention0 says 'bfloat16', ffn0 has 'float32'"),
    ("max_payload_bytes", 64, f"max_payload_bytes mismatch: attention0 says 64, ffn0 has {MAX_PAYLOAD}"),
]


@pytest.mark.parametrize("transport", ["inproc", *PROCESSES])
@pytest.mark.parametrize(("field", "value", "message"), MISMATCHES)
def test_disagreement_names_both_values(
    field: str, value: Any, message: str, transport: str, listen: Any, store_port: int
) -> None:
    forced = "auto" if transport == "inproc" else transport
    mine, theirs = (options(node, forced, store_port=store_port) for node in ("attention0", "ffn0"))
    wrong = replace(mine, **{field: value})
    if transport == "inproc":
        with pytest.raises(ProtocolError, match=message):
            link_pair(wrong, theirs)
        return
    node = listen(theirs)
    with pytest.raises(ProtocolError, match=message):
        connect(node.address, wrong)
    near, far = new_link(node, mine)
    check_works(near, far)
    near.close()
    far.close()


def test_every_disagreement_is_named_at_once(listen: Any) -> None:
    node = listen(options("ffn0"))
    with pytest.raises(ProtocolError, match=r"fingerprint mismatch.*; dtype mismatch"):
        connect(node.address, replace(options(), fingerprint=1, dtype="bfloat16"))


def test_a_refusal_is_heard_though_the_listener_has_hung_up(listen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = listen(options("ffn0"))
    send_fds = socket.send_fds

    def send_and_dawdle(sock: socket.socket, *arguments: Any) -> int:
        sent = send_fds(sock, *arguments)
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        assert poller.poll(PATIENCE_S * 1000)
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_dawdle)
    with pytest.raises(ProtocolError, match="dtype mismatch"):
        connect(node.address, replace(options(), dtype="bfloat16"))


def test_another_protocol_version(listen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = listen(options("ffn0"))
    old_hello = options().hello("shm", "x")
    monkeypatch.setattr(handshake, "VERSION", 2)
    answer = ask(node.address, encode_message(old_hello))
    assert "protocol_version mismatch: attention0 says 1, ffn0 has 2" in answer.refusal


@pytest.mark.parametrize(("theirs", "mine"), [("gloo", "shm"), ("shm", "gloo")])
def test_another_transport(theirs: str, mine: str, listen: Any, store_port: int) -> None:
    node = listen(options("ffn0", theirs, store_port=store_port))
    with pytest.raises(ProtocolError, match=f"transport mismatch: attention0 says '{mine}', ffn0 has '{theirs}'"):
        connect(node.address, options("attention0", mine, store_port=store_port))


def test_another_number_of_lanes(listen: Any) -> None:
    node = listen(options("ffn0", lanes=2))
    with pytest.raises(ProtocolError, match=r"shared memory mismatch: the peer offers \d+ bytes, this node has \d+"):
        connect(node.address, options(lanes=3))


def test_two_kinds_of_links_at_one_listener(listen: Any, store_port: int) -> None:
    node = listen(options("ffn0", store_port=store_port))
    pairs = [new_link(node, options(store_port=store_port)) for _ in range(2)]
    elsewhere = msgspec.structs.replace(node.address, host_id="elsewhere")
    pairs.append(new_link(node, options(store_port=store_port), elsewhere))
    assert [near.transport for near, _ in pairs] == [far.transport for _, far in pairs] == ["shm", "shm", "gloo"]
    node.close()
    for pair in pairs:
        check_works(*pair)
        for link in pair:
            link.close()


def ask(address: LinkAddress, data: bytes) -> Answer:
    """A stranger's bytes on the Unix socket, and the listener's answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(address.unix_path)
        sock.sendall(data)
        (length,) = LENGTH.unpack(sock.recv(LENGTH.size, socket.MSG_WAITALL))
        return handshake.decode_answer(sock.recv(length, socket.MSG_WAITALL))


STRANGERS = {
    "too long": (struct.pack("<I", 1 << 31), f"{1 << 31} bytes, at most {MAX_MESSAGE_BYTES}"),
    "http": (b"GET / HTTP/1.1\r\n\r\n", f"bytes, at most {MAX_MESSAGE_BYTES}"),
    "no msgpack": (LENGTH.pack(5) + b"\xc1abcd", "no link hello"),
    "other fields": (LENGTH.pack(1) + b"\x80", "no link hello: .*node"),
    "no memory": (encode_message(options().hello("shm", "x")), "came with 0 descriptors, expected 1"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_told_and_forgotten(stranger: str, listen: Any) -> None:
    data, message = STRANGERS[stranger]
    node = listen(options("ffn0"))
    assert re.search(message, ask(node.address, data).refusal)
    near, far = new_link(node, options())
    check_works(near, far)
    near.close()
    far.close()


def test_silence_holds_up_nobody(listen: Any) -> None:
    """Connections that say nothing, half a hello, or hang up in its middle."""
    node = listen(options("ffn0"))
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for stranger in strangers:
        stranger.connect(node.address.unix_path)
    strangers += [socket.create_connection((node.address.tcp_host, node.address.tcp_port))]
    strangers[1].sendall(LENGTH.pack(100) + b"half")
    strangers[2].sendall(LENGTH.pack(100)[:2])
    strangers[2].close()
    near, far = new_link(node, options())
    check_works(near, far)
    for closing in (near, far, *strangers):
        closing.close()


def test_silence_ends_with_the_rendezvous_timeout(listen: Any) -> None:
    theirs = options("ffn0")
    node = listen(
        replace(theirs, exchange=msgspec.structs.replace(theirs.exchange, rendezvous_timeout_s=0.05)), idle=True
    )
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(node.address.unix_path)
        stranger.settimeout(0.01)
        for _ in range(int(PATIENCE_S / 0.01)):
            assert node.listener.accept() is None
            try:
                assert stranger.recv(1) == b""
                return
            except TimeoutError:
                continue
    raise AssertionError("the silent connection was kept")


def test_a_peer_that_never_joins_the_group_holds_up_nobody(listen: Any, store_port: int) -> None:
    """It says a right hello for gloo and vanishes; the listener waits for it on a thread."""
    node = listen(options("ffn0", store_port=store_port))
    with socket.create_connection((node.address.tcp_host, node.address.tcp_port)) as stranger:
        stranger.sendall(encode_message(options().hello("gloo", "vanished")))
        assert LENGTH.unpack(stranger.recv(LENGTH.size, socket.MSG_WAITALL))[0] > 0
        near, far = new_link(node, options(store_port=store_port))
    check_works(near, far)
    near.close()
    far.close()


def address(tmp_path: Path, **changes: Any) -> LinkAddress:
    base = LinkAddress("ffn0", host_id(), str(tmp_path / "nobody.sock"), "127.0.0.1", 9)
    return msgspec.structs.replace(base, **changes)


def test_nobody_there(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "nobody.sock"))
    stale.close()
    with pytest.raises(LinkClosedError, match=r"no shm link to ffn0 at .*nobody\.sock"):
        connect(address(tmp_path), options())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkClosedError, match=f"no gloo link to ffn0 at 127.0.0.1:{port}"):
        connect(address(tmp_path, tcp_port=port), options(transport="gloo"))


def test_a_listener_that_never_answers(listen: Any) -> None:
    node = listen(options("ffn0"), idle=True)
    mine = options()
    impatient = replace(mine, exchange=msgspec.structs.replace(mine.exchange, rendezvous_timeout_s=0.1))
    with pytest.raises(LinkTimeoutError, match=r"no shm link to ffn0 within 0\.1 s"):
        connect(node.address, impatient)


def test_choice_of_transport(listen: Any, tmp_path: Path) -> None:
    here = listen(options("ffn0")).address
    elsewhere = msgspec.structs.replace(here, host_id="elsewhere")
    assert choose_transport(here, options()) == "shm"
    assert choose_transport(elsewhere, options()) == "gloo"
    assert choose_transport(address(tmp_path), options()) == "gloo"
    assert choose_transport(here, options(transport="gloo")) == "gloo"
    assert choose_transport(here, replace(options(), device="cuda")) == "nccl"
    with pytest.raises(ConfigError, match=r"exchange.transport shm: ffn0 is on host elsewhere"):
        choose_transport(elsewhere, options(transport="shm"))


@pytest.mark.parametrize(
    ("transport", "device", "message"),
    [
        ("nccl", "cpu", "exchange.transport nccl carries CUDA tensors, cluster.device is cpu"),
        ("shm", "cuda", "exchange.transport shm carries CPU tensors, cluster.device is cuda"),
        ("gloo", "cuda", "exchange.transport gloo carries CPU tensors, cluster.device is cuda"),
    ],
)
def test_transports_that_cannot_work(transport: str, device: Any, message: str, tmp_path: Path) -> None:
    wrong = replace(options(transport=transport), device=device)
    with pytest.raises(ConfigError, match=message):
        connect(address(tmp_path), wrong)
    with pytest.raises(ConfigError, match=message):
        LinkListener(wrong, tmp_path / "x.sock", "127.0.0.1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_nccl_without_cuda(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch has no CUDA with NCCL here"):
        connect(address(tmp_path), replace(options(transport="nccl"), device="cuda"))


def test_a_path_too_long_for_a_unix_socket(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107"):
        LinkListener(options("ffn0"), tmp_path / ("x" * 108), "127.0.0.1")


def test_a_listener_takes_over_a_dead_ones_path(tmp_path: Path) -> None:
    path = tmp_path / "ffn0.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    node = Node(options("ffn0"), path, idle=False)
    near, far = new_link(node, options())
    node.close()
    node.close()
    assert not path.exists()
    for link in (near, far):
        link.close()


def resources() -> tuple[int, int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("moe-link")
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


@pytest.mark.parametrize(("transport", "rounds"), [("shm", 200), ("gloo", 30)])
def test_links_come_and_go_without_a_trace(transport: str, rounds: int, listen: Any, store_port: int) -> None:
    """Whoever closes first, and with a payload under way that nobody reads (gloo waits close_timeout_s for it)."""
    base = options("ffn0", transport, store_port=store_port)
    theirs = replace(base, exchange=msgspec.structs.replace(base.exchange, close_timeout_s=0.02))
    node = listen(theirs)
    before = None
    for i in range(rounds):
        near, far = new_link(node, replace(theirs, node="attention0"))
        if i % 2:
            send_bytes(near, random_bytes(4096, 0))
        for link in (near, far) if i % 3 else (far, near):
            link.close()
        del near, far, link
        if i == 5:
            before = resources()
    assert resources() == before
