"""Round trips of one link, per transport and payload size: python benchmarks/bench_transport.py [--rounds N].

Two processes (inproc: two threads) that wait in poll(), as nodes do; nobody spins. The floor is a bare Unix socket that
carries as many bytes as a frame's head: what waking a process up costs. Transports take turns, so that all see the same
machine.
"""

import argparse
import multiprocessing
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_runtime.bench.report import Row, print_table, write_report
from moe_runtime.config import ExchangeConfig
from moe_runtime.errors import LinkClosedError
from moe_runtime.protocol.header import Header, Kind, PayloadType
from moe_runtime.protocol.payload import payload_size
from moe_runtime.transport import Link, LinkListener, LinkOptions, connect
from moe_runtime.transport.channel import HEAD_BYTES
from moe_runtime.transport.inproc import link_pair

Transport = Literal["shm", "gloo", "inproc"]
TRANSPORTS: tuple[Transport, ...] = ("shm", "gloo", "inproc")
SIZES_KB = (2, 37, 150)
TURNS = 5
WARM_UP = 50
COMMAND = "python benchmarks/bench_transport.py"
RoundTrip = Callable[[], None]

_context = multiprocessing.get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400, help=f"round trips in each of {TURNS} turns")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with ExitStack() as stack:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        links = {name: stack.enter_context(open_link(name, folder, store.port)) for name in TRANSPORTS}
        floor = measure({"bare socket": stack.enter_context(bare_socket())}, rounds)["bare socket"]
        rows = [Row(f"bare socket, {HEAD_BYTES} B", "round trip, median", floor, "us")]
        for size in SIZES_KB:
            rows += size_rows(size, measure({name: round_trip(link, size) for name, link in links.items()}, rounds))
    print_table("Round trip of one link between two processes (inproc: two threads)", rows)
    print(write_report("transport", rows, COMMAND))


def size_rows(size_kb: int, figures: dict[str, float]) -> list[Row]:
    """Everything against shared memory, what a link on one host takes by itself."""
    yardstick = figures["shm"]
    return [
        Row(f"{name}, {size_kb} KB", "round trip, median", value, "us", "shm", value / yardstick)
        for name, value in figures.items()
    ]


def measure(trips: dict[str, RoundTrip], rounds: int) -> dict[str, float]:
    """The median over all turns, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in trips}
    for _ in range(TURNS):
        for name, trip in trips.items():
            for i in range(WARM_UP + rounds):
                start = time.perf_counter()
                trip()
                if i >= WARM_UP:
                    times[name].append(time.perf_counter() - start)
    return {name: median(values) * 1e6 for name, values in times.items()}


def round_trip(link: Link, size_kb: int) -> RoundTrip:
    """Send a payload, wait for the same back. The header and the parts exist already, as an engine's would."""
    part = torch.randint(0, 256, (size_kb * 1024,), dtype=torch.uint8)
    header = Header(
        Kind.DISPATCH, PayloadType.FLOAT32, sender=0, lane=0, layer=0, epoch=0, step=0, tokens=1, hidden=1, picks=1,
        payload_bytes=payload_size([part]), clock=0, fingerprint=1,
    )  # fmt: skip
    poller = poll_in(link)

    def trip() -> None:
        link.send(header, [part])
        while True:
            poller.poll()
            frame = link.receive()
            if frame is not None:
                break

    return trip


@contextmanager
def open_link(transport: Transport, folder: Path, store_port: int) -> Iterator[Link]:
    forced: Literal["auto", "shm", "gloo"] = "auto" if transport == "inproc" else transport
    mine, theirs = (options(node, forced, store_port) for node in ("attention0", "ffn0"))
    if transport == "inproc":
        link, far = link_pair(mine, theirs)
        peer: threading.Thread | multiprocessing.process.BaseProcess = threading.Thread(target=echo, args=(far,))
        peer.start()
    else:
        pipe, far_pipe = _context.Pipe()
        peer = _context.Process(target=serve, args=(theirs, folder / f"{transport}.sock", far_pipe), daemon=True)
        peer.start()
        link = connect(pipe.recv(), mine)
    yield link
    link.close()
    peer.join(10)


def options(node: str, transport: Literal["auto", "shm", "gloo"], store_port: int) -> LinkOptions:
    largest = (max(SIZES_KB) + 1) * 1024
    return LinkOptions(node, 0, 1, "float32", largest, ExchangeConfig(transport=transport), store_port=store_port)


def serve(theirs: LinkOptions, unix_path: Path, pipe: "multiprocessing.connection.Connection") -> None:
    torch.set_num_threads(1)
    listener = LinkListener(theirs, unix_path, "127.0.0.1")
    pipe.send(listener.address)
    poller = poll_in(listener)
    link = None
    while link is None:
        poller.poll()
        link = listener.accept()
    listener.close()
    echo(link)


def echo(link: Link) -> None:
    poller = poll_in(link)
    try:
        while True:
            poller.poll()
            frame = link.receive()
            if frame is not None:
                link.send(frame.header, [frame.payload])
    except LinkClosedError:
        link.close()


@contextmanager
def bare_socket() -> Iterator[RoundTrip]:
    near, far = socket.socketpair()
    peer = _context.Process(target=echo_bytes, args=(far,), daemon=True)
    peer.start()
    far.close()
    poller, data = poll_in(near), bytes(HEAD_BYTES)

    def trip() -> None:
        near.send(data)
        poller.poll()
        near.recv(HEAD_BYTES)

    yield trip
    near.close()
    peer.join(10)


def echo_bytes(sock: socket.socket) -> None:
    poller = poll_in(sock)
    while True:
        poller.poll()
        data = sock.recv(HEAD_BYTES)
        if not data:
            return
        sock.send(data)


def poll_in(pollable: Link | LinkListener | socket.socket) -> select.poll:
    poller = select.poll()
    poller.register(pollable.fileno(), select.POLLIN)
    return poller


if __name__ == "__main__":
    main()
