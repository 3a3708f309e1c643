"""Peers for the transport tests: what the other end of a link does, in a process (shm, gloo) or a thread (inproc)."""

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.config import ExchangeConfig
from moe_runtime.errors import LinkClosedError
from moe_runtime.protocol.header import Header, Kind, PayloadType
from moe_runtime.protocol.payload import Frame, aligned, payload_size
from moe_runtime.transport import Link, LinkListener, LinkOptions, connect
from moe_runtime.transport.inproc import link_pair

PATIENCE_S = 20.0
MAX_PAYLOAD = 1 << 16
Behaviour = Callable[[Link], None]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "moe_runtime.transport"])


def options(
    node: str = "attention0",
    transport: str = "auto",
    lanes: int = 2,
    store_port: int = 0,
    timeout_s: float = PATIENCE_S,
) -> LinkOptions:
    exchange = ExchangeConfig(
        transport=transport,
        lanes=lanes,
        rendezvous_timeout_s=PATIENCE_S,
        reply_timeout_s=timeout_s,
        close_timeout_s=PATIENCE_S,
    )
    return LinkOptions(
        node,
        index=3,
        fingerprint=0xFEED,
        dtype="float32",
        max_payload_bytes=MAX_PAYLOAD,
        exchange=exchange,
        store_port=store_port,
    )


def header(size: int, step: int = 0, kind: Kind = Kind.DISPATCH) -> Header:
    return Header(
        kind, PayloadType.FLOAT32, sender=3, lane=1, layer=5, epoch=2, step=step, tokens=7, hidden=8, picks=4,
        payload_bytes=size, clock=9, fingerprint=0xFEED,
    )  # fmt: skip


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def send_bytes(link: Link, data: Tensor, step: int = 0) -> None:
    link.send(header(payload_size([data]), step), [data])


def wait_readable(link: Link, timeout_s: float = PATIENCE_S) -> bool:
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def receive(link: Link) -> Frame:
    """The next frame; None from receive() (a head that is not whole yet) means wait again."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert wait_readable(link), "no frame in time"
        frame = link.receive()
        if frame is not None:
            return frame
    raise AssertionError("no whole frame in time")


def echo(link: Link) -> None:
    with contextlib.suppress(LinkClosedError):
        while True:
            frame = receive(link)
            link.send(frame.header, [frame.payload])


def hold(link: Link) -> None:
    """Read nothing until the peer has hung up."""
    poller = select.poll()
    poller.register(link.fileno(), select.POLLRDHUP)
    poller.poll(PATIENCE_S * 1000)


def hang_up(link: Link) -> None:
    receive(link)


def say_raw(link: Link, data: bytes) -> None:
    """Write to the link's socket what no link would."""
    link._sock.sendall(data)  # type: ignore[attr-defined]
    hold(link)


def say_in_pieces(link: Link, pieces: tuple[bytes, ...]) -> None:
    """The next piece only when the other side has seen what one makes of the last."""
    for piece in pieces[:-1]:
        link._sock.sendall(piece)  # type: ignore[attr-defined]
        receive(link)
    say_raw(link, pieces[-1])


def say_three(link: Link) -> None:
    for step in range(3):
        send_bytes(link, random_bytes(1000 + step, step), step)


def converse(link: Link, seed: int, count: int, lanes: int) -> None:
    """Send `count` frames of random sizes while answering the peer's, with at most `lanes` unanswered, as lanes do."""
    picker = torch.Generator().manual_seed(seed)
    sent = answered = received = 0
    while received < count or answered < count:
        if sent < count and sent - answered < lanes:
            data = random_bytes(_size(picker), seed * 1000 + sent)
            link.send(replace(header(aligned(data.numel()), sent), tokens=data.numel()), [data])
            sent += 1
            continue
        frame = receive(link)
        if frame.header.kind is Kind.REPLY:
            assert frame.header.step == answered and frame.payload.numel() == 0
            answered += 1
        else:
            expected = random_bytes(frame.header.tokens, (1 - seed) * 1000 + received)
            assert frame.header.step == received
            assert torch.equal(frame.payload[: frame.header.tokens], expected)
            link.send(header(0, received, Kind.REPLY), [])
            received += 1


def converse_as_peer(link: Link) -> None:
    converse(link, seed=1, count=120, lanes=2)


def converse_as_peer_in_one_lane(link: Link) -> None:
    converse(link, seed=1, count=120, lanes=1)


def _size(picker: torch.Generator) -> int:
    """0, small, or close to the largest, which is half of a one-lane ring."""
    kind = int(torch.randint(0, 4, (), generator=picker))
    top = (1, 3000, MAX_PAYLOAD, MAX_PAYLOAD)[kind]
    size = int(torch.randint(0, top, (), generator=picker))
    return max(size, MAX_PAYLOAD - 100) if kind == 3 else size


@dataclass
class Peer:
    """The other end. freeze and kill need a process of its own."""

    pid: int | None
    join: Callable[[], None]

    def freeze(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def linked(
    transport: str, behaviour: Behaviour, folder: Path, store_port: int, lanes: int = 2, timeout_s: float = PATIENCE_S
) -> Iterator[tuple[Link, Peer]]:
    """A link to a peer that behaves so and then closes; the peer's own assertion errors surface at the end."""
    forced = "auto" if transport == "inproc" else transport
    mine, theirs = (options(node, forced, lanes, store_port, timeout_s) for node in ("attention0", "ffn0"))
    if transport == "inproc":
        link, far = link_pair(mine, theirs)
        peer = _thread(behaviour, far)
    else:
        peer, address = _process(behaviour, theirs, folder)
        link = connect(address, mine)
    try:
        yield link, peer
    finally:
        link.close()
        peer.join()


def _thread(behaviour: Behaviour, link: Link) -> Peer:
    faults: list[BaseException] = []

    def run() -> None:
        try:
            behaviour(link)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            faults.append(error)
        link.close()

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        if faults:
            raise faults[0]

    return Peer(None, join)


def _process(behaviour: Behaviour, theirs: LinkOptions, folder: Path):  # type: ignore[no-untyped-def]
    near, far = _context.Pipe()
    process = _context.Process(target=_serve, args=(behaviour, theirs, folder / "ffn0.sock", far), daemon=True)
    process.start()
    far.close()
    assert near.poll(PATIENCE_S), "the peer did not start"
    address = near.recv()

    def join() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.join(PATIENCE_S)
        assert process.exitcode is not None, "the peer did not end"
        assert process.exitcode in (0, -signal.SIGKILL), f"the peer failed with {process.exitcode}"

    return Peer(process.pid, join), address


def _serve(behaviour: Behaviour, theirs: LinkOptions, unix_path: Path, pipe) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    listener = LinkListener(theirs, unix_path, "127.0.0.1")
    pipe.send(listener.address)
    link = accept(listener)
    listener.close()
    behaviour(link)
    link.close()


def accept(listener: LinkListener) -> Link:
    poller = select.poll()
    poller.register(listener.fileno(), select.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        link = listener.accept()
        if link is not None:
            return link
        poller.poll(100)
    raise AssertionError("nobody connected")
