"""One contract, three transports: the same tests over shared memory, gloo (real processes) and the in-process twin."""

import os
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from transport_peers import (
    MAX_PAYLOAD,
    PATIENCE_S,
    converse,
    converse_as_peer,
    converse_as_peer_in_one_lane,
    echo,
    hang_up,
    header,
    hold,
    linked,
    random_bytes,
    receive,
    say_in_pieces,
    say_raw,
    say_three,
    send_bytes,
    wait_readable,
)

from moe_runtime.errors import LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.protocol.header import HEADER_BYTES, MAGIC, VERSION
from moe_runtime.protocol.payload import payload_size

ALL = ("inproc", "shm", "gloo")
PROCESSES = ("shm", "gloo")
_MARK = struct.Struct("<Q")


@pytest.fixture(scope="module")
def store_port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


@pytest.mark.parametrize("transport", ALL)
def test_echo_keeps_header_and_bytes(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, echo, tmp_path, store_port) as (link, _):
        assert (link.peer, link.peer_index, link.transport) == ("ffn0", 3, transport)
        for step, size in enumerate((0, 1, 63, 64, 65, 5000, MAX_PAYLOAD, 0)):
            data = random_bytes(size, step)
            sent = header(payload_size([data]), step)
            link.send(sent, [data])
            data_copy = data.clone()
            data.zero_()
            frame = receive(link)
            assert frame.header == sent
            assert frame.payload.dtype == torch.uint8 and frame.payload.numel() == sent.payload_bytes
            assert torch.equal(frame.payload[:size], data_copy)


@pytest.mark.parametrize("transport", ALL)
def test_parts_start_on_boundaries(transport: str, tmp_path: Path, store_port: int) -> None:
    parts = [torch.arange(21, dtype=torch.float32).view(7, 3), torch.full((5,), -2, dtype=torch.int32), torch.empty(0)]
    with linked(transport, echo, tmp_path, store_port) as (link, _):
        link.send(header(payload_size(parts)), parts)
        payload = receive(link).payload
    assert torch.equal(payload[:84].view(torch.float32).view(7, 3), parts[0])
    assert torch.equal(payload[128:148].view(torch.int32), parts[1])


@pytest.mark.parametrize("transport", ALL)
def test_both_directions_at_once(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, converse_as_peer, tmp_path, store_port, lanes=2) as (link, _):
        converse(link, seed=0, count=120, lanes=2)


@pytest.mark.parametrize("transport", ALL)
def test_one_lane_with_payloads_of_half_the_ring(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, converse_as_peer_in_one_lane, tmp_path, store_port, lanes=1) as (link, _):
        converse(link, seed=0, count=120, lanes=1)


@pytest.mark.parametrize("transport", ALL)
def test_frames_queue_in_order_and_outlive_the_peers_close(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, say_three, tmp_path, store_port) as (link, _):
        for step in range(3):
            assert wait_readable(link)
            frame = receive(link)
            assert frame.header.step == step
            assert torch.equal(frame.payload[: 1000 + step], random_bytes(1000 + step, step))
        assert wait_readable(link)
        for _ in range(2):
            with pytest.raises(LinkClosedError, match="ffn0"):
                link.receive()


@pytest.mark.parametrize("transport", ALL)
def test_receive_never_waits_for_a_frame_to_begin(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, hold, tmp_path, store_port) as (link, _):
        assert link.receive() is None
        assert not wait_readable(link, 0.01)


@pytest.mark.parametrize("transport", ALL)
def test_send_to_a_closed_peer(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, hang_up, tmp_path, store_port) as (link, _):
        send_bytes(link, random_bytes(100, 0))
        deadline = time.monotonic() + PATIENCE_S
        with pytest.raises(LinkClosedError):
            while time.monotonic() < deadline:
                send_bytes(link, random_bytes(100, 0))


@pytest.mark.parametrize("transport", ALL)
def test_closed_on_this_side(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, hold, tmp_path, store_port) as (link, _):
        link.close()
        link.close()
        with pytest.raises(LinkClosedError):
            link.send(header(0), [])
        with pytest.raises(LinkClosedError):
            link.receive()


@pytest.mark.parametrize("transport", PROCESSES)
def test_killed_peer_is_noticed_and_leaves_nothing(transport: str, tmp_path: Path, store_port: int) -> None:
    before = sorted(os.listdir("/dev/shm"))
    with linked(transport, echo, tmp_path, store_port) as (link, peer):
        send_bytes(link, random_bytes(5000, 0))
        receive(link)
        peer.kill()
        assert wait_readable(link)
        with pytest.raises(LinkClosedError):
            link.receive()
        deadline = time.monotonic() + PATIENCE_S
        with pytest.raises(LinkClosedError):
            while time.monotonic() < deadline:
                send_bytes(link, random_bytes(5000, 0))
    assert sorted(os.listdir("/dev/shm")) == before
    assert list(tmp_path.iterdir()) == []
    assert "moe-link" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("transport", PROCESSES)
def test_peer_killed_while_a_send_waits_for_room(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, hold, tmp_path, store_port) as (link, peer):
        peer.freeze()
        killer = threading.Timer(0.5, peer.kill)
        killer.start()
        with pytest.raises(LinkClosedError):
            for step in range(50):
                send_bytes(link, random_bytes(MAX_PAYLOAD, 0), step)
        killer.join()


@pytest.mark.parametrize("transport", ALL)
def test_send_to_a_stopped_peer_times_out(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, hold, tmp_path, store_port, lanes=2, timeout_s=0.3) as (link, peer):
        peer.freeze()
        for step in range(2):
            send_bytes(link, random_bytes(MAX_PAYLOAD, 0), step)
        with pytest.raises(LinkTimeoutError, match=r"0\.3 s"):
            for step in range(50):
                send_bytes(link, random_bytes(MAX_PAYLOAD, 0), step)
        if peer.pid is not None:
            peer.kill()


@pytest.mark.parametrize("transport", PROCESSES)
def test_heads_alone_time_out_too(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, hold, tmp_path, store_port, timeout_s=0.3) as (link, peer):
        peer.freeze()
        with pytest.raises(LinkTimeoutError, match="took no message"):
            for step in range(1_000_000):
                link.send(header(0, step), [])
        with pytest.raises(LinkClosedError):
            link.send(header(0), [])
        peer.kill()


@pytest.mark.parametrize("transport", ALL)
def test_send_refuses_what_does_not_fit(transport: str, tmp_path: Path, store_port: int) -> None:
    with linked(transport, echo, tmp_path, store_port) as (link, _):
        with pytest.raises(ValueError, match=f"{MAX_PAYLOAD + 64} bytes exceeds the link's {MAX_PAYLOAD}"):
            send_bytes(link, random_bytes(MAX_PAYLOAD + 64, 0))
        with pytest.raises(ValueError, match="announces 128 payload bytes, the parts take 64"):
            link.send(header(128), [random_bytes(64, 0)])
        with pytest.raises(ValueError, match="announces 64 payload bytes, the parts take more"):
            link.send(header(64), [random_bytes(65, 0)])
        data = random_bytes(640, 1)
        send_bytes(link, data)
        assert torch.equal(receive(link).payload, data)


def head(mark: int = 0, size: int = 0, **fields: int) -> bytes:
    """A head with single bytes of the protocol header overwritten."""
    packed = bytearray(header(size).pack())
    for name, value in fields.items():
        offset, form = {"magic": (0, "<I"), "version": (4, "<H"), "kind": (6, "<B"), "step": (32, "<I")}[name]
        struct.pack_into(form, packed, offset, value)
    return _MARK.pack(mark) + packed


BAD_HEADS = {
    "version": (head(version=VERSION + 1), f"protocol version mismatch: .* {VERSION + 1}, .* {VERSION}"),
    "garbage": (b"\xa5" * (8 + HEADER_BYTES), f"magic mismatch: .* {0xA5A5A5A5}, .* {MAGIC}"),
    "kind": (head(kind=77), "77 is not a valid Kind"),
    "oversized": (head(size=1 << 50), f"{1 << 50} bytes, this link takes at most {MAX_PAYLOAD}"),
    "mark": (head(mark=(1 << 40) - 5, size=64), str((1 << 40) - 5)),
}


@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize("case", BAD_HEADS)
def test_bad_heads_name_both_values(case: str, transport: str, tmp_path: Path, store_port: int) -> None:
    data, message = BAD_HEADS[case]
    peer = linked(transport, partial(say_raw, data=data), tmp_path, store_port)
    with peer as (link, _), pytest.raises(ProtocolError, match=message):
        receive(link)


@pytest.mark.parametrize("transport", ALL)
def test_heads_may_come_in_pieces(transport: str, tmp_path: Path, store_port: int) -> None:
    first, second = head(step=1), head(step=2)
    pieces = (first[:30], first[30:] + second + second[:9], second[9:])
    with linked(transport, partial(say_in_pieces, pieces=pieces), tmp_path, store_port) as (link, _):
        assert wait_readable(link)
        assert link.receive() is None
        link.send(header(0), [])
        assert receive(link).header == header(0, step=1)
        assert receive(link).header == header(0, step=2)
        link.send(header(0), [])
        assert receive(link).header == header(0, step=2)
