"""NCCL's payload plane without a GPU: groups that only record stand in for NCCL's, CPU tensors for CUDA's."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from moe_runtime.config import ExchangeConfig
from moe_runtime.errors import LinkClosedError, LinkTimeoutError, ProtocolError
from moe_runtime.transport.dist import NcclPlane
from moe_runtime.transport.handshake import LinkOptions

OPTIONS = LinkOptions(
    "attention0", 0, 1, "float32", 1024, ExchangeConfig(lanes=2, reply_timeout_s=0.02, close_timeout_s=0.02)
)


@dataclass
class FakeWork:
    done: bool = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> bool:
        return True


@dataclass
class FakeGroup:
    name: str
    log: list[str]
    works: list[FakeWork] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        return self._record("send", tensors[0], peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        tensors[0].fill_(tag)
        return self._record("recv", tensors[0], peer, tag)

    def shutdown(self) -> None:
        self.log.append(f"{self.name} shutdown")

    def abort(self) -> None:
        self.log.append(f"{self.name} abort")

    def _record(self, what: str, tensor: Tensor, peer: int, tag: int) -> FakeWork:
        self.log.append(f"{self.name} {what} {tensor.numel()} with {peer} as {tag}")
        self.tensors.append(tensor)
        self.works.append(FakeWork())
        return self.works[-1]


@dataclass
class Bench:
    plane: NcclPlane
    out: FakeGroup
    peer: socket.socket
    log: list[str]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(NcclPlane, "_empty", lambda self, size: torch.empty(size, dtype=torch.uint8))
    log: list[str] = []
    out, back = FakeGroup("out", log), FakeGroup("back", log)
    near, far = socket.socketpair()
    yield Bench(NcclPlane(out, back, near, OPTIONS, rank=0), out, far, log)  # type: ignore[arg-type]
    near.close()
    far.close()


def test_each_direction_has_its_group_and_numbers(bench: Bench) -> None:
    part = torch.arange(64, dtype=torch.uint8)
    assert [bench.plane.put([part], 64), bench.plane.put([part, part], 128)] == [1, 2]
    assert torch.equal(bench.plane.take(1, 32), torch.full((32,), 1, dtype=torch.uint8))
    assert bench.log == ["out send 64 with 1 as 1", "out send 128 with 1 as 2", "back recv 32 with 1 as 1"]
    assert torch.equal(bench.out.tensors[1], torch.cat([part, part]))
    with pytest.raises(ProtocolError, match="the message says 4, this node has 2"):
        bench.plane.take(4, 32)
    with pytest.raises(ValueError, match="announces 128 payload bytes, the parts take 64"):
        bench.plane.put([part], 128)


def fill(bench: Bench) -> None:
    for _ in range(OPTIONS.exchange.lanes + 1):
        bench.plane.put([torch.zeros(64)], 256)


def test_sends_under_way_are_bounded(bench: Bench) -> None:
    fill(bench)
    with pytest.raises(LinkTimeoutError, match=r"0\.02 s"):
        bench.plane.put([torch.zeros(64)], 256)
    bench.out.works[0].done = True
    assert bench.plane.put([torch.zeros(64)], 256) == 4


def test_a_full_plane_notices_a_dead_peer(bench: Bench) -> None:
    fill(bench)
    bench.plane._timeout_s = 60.0
    bench.peer.close()
    with pytest.raises(LinkClosedError):
        bench.plane.put([torch.zeros(64)], 256)


@pytest.mark.parametrize(("finished", "end"), [(True, "shutdown"), (False, "abort")])
def test_close_cancels_what_is_stuck(finished: bool, end: str, bench: Bench) -> None:
    fill(bench)
    for work in bench.out.works:
        work.done = finished
    bench.plane.close()
    assert bench.log[-2:] == [f"out {end}", f"back {end}"]
