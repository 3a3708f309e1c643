"""Messages between the controller and all other processes (ZeroMQ: it binds a ROUTER, nodes connect DEALERs).

Start-up: Hello -> Welcome; all nodes load at once; FFN nodes answer Listening; then attention nodes get Peers, link
and answer Serving; then the gateway gets Peers with their request addresses and answers Serving with its URL. The
cluster is ready when every process has said Serving. Afterwards: Heartbeat up, ClusterStats down to the gateway,
Shutdown down.
"""

from typing import Literal

import msgspec

from moe_runtime.config import Config

PROTOCOL_VERSION = 1
Role = Literal["attention", "ffn", "gateway"]


class LayerSlots(msgspec.Struct, frozen=True):
    """eplb.LayerPlacement on the wire."""

    expert_of_slot: tuple[int, ...]
    node_of_slot: tuple[int, ...]
    experts: int


class PlacementMessage(msgspec.Struct, frozen=True):
    """eplb.Placement on the wire."""

    epoch: int
    nodes: tuple[str, ...]
    layers: tuple[LayerSlots, ...]


class LinkAddress(msgspec.Struct, frozen=True):
    """Where an FFN node accepts links. host_id says whether unix_path can be reached and memory shared."""

    node: str
    host_id: str
    unix_path: str
    tcp_host: str
    tcp_port: int


class RequestAddress(msgspec.Struct, frozen=True):
    """Where an attention node takes requests, and what it can hold."""

    node: str
    endpoint: str
    kv_tokens: int
    max_context: int


class Sample(msgspec.Struct, frozen=True):
    """One metric value at a moment; names and label keys are Prometheus's, without the `moe_runtime_` prefix."""

    name: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: dict[str, str] = {}


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First word of a process: who it is, and that it speaks this protocol."""

    node: str
    role: Role
    pid: int
    version: int = PROTOCOL_VERSION


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """All that a process needs to load: `spec` is a msgpack-encoded models.spec.ModelSpec, store the TCPStore's
    address.

    run_dir: a directory for Unix sockets and logs, removed by the launcher. fingerprint: hash of the checkpoint.
    cores: the only ones this process may run on; empty for any.
    """

    config: Config
    model_dir: str
    spec: bytes
    fingerprint: int
    placement: PlacementMessage | None
    store_host: str
    store_port: int
    run_dir: str
    threads: int
    index: int
    cores: tuple[int, ...] = ()


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Loading: fraction in 0..1 and what is being done."""

    node: str
    fraction: float
    what: str


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """An FFN node has its weights and accepts links."""

    address: LinkAddress


class Peers(msgspec.Struct, frozen=True, tag="peers"):
    """Whom to connect to: FFN nodes for an attention node, attention nodes for the gateway."""

    ffn: tuple[LinkAddress, ...] = ()
    attention: tuple[RequestAddress, ...] = ()


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """Ready to do its part. request_address from attention nodes, url from the gateway."""

    node: str
    request_address: RequestAddress | None = None
    url: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Alive, with the node's current metrics."""

    node: str
    samples: tuple[Sample, ...] = ()


class ClusterStats(msgspec.Struct, frozen=True, tag="stats"):
    """Every node's last samples, for the gateway's /metrics."""

    nodes: dict[str, tuple[Sample, ...]]


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """A process cannot go on; the launch ends with this message."""

    node: str
    message: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish what is running (within drain_timeout_s), then exit 0."""


ToController = Hello | Progress | Listening | Serving | Heartbeat | Fatal
FromController = Welcome | Peers | ClusterStats | Shutdown

encode = msgspec.msgpack.Encoder().encode
decode_to_controller = msgspec.msgpack.Decoder(ToController).decode
decode_from_controller = msgspec.msgpack.Decoder(FromController).decode
