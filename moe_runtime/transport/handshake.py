"""How two ends of a new socket agree before they become a link: one length-prefixed msgpack message each way.

The connecting side sends its LinkHello; the listener answers with its own or with a refusal that names both values.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import node as hostname
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from moe_runtime.config import ExchangeConfig
from moe_runtime.errors import ConfigError, ProtocolError
from moe_runtime.protocol.header import VERSION
from moe_runtime.transport.base import LinkHello
from moe_runtime.transport.channel import LinkTerms

MAX_MESSAGE_BYTES = 64 * 1024
LENGTH = struct.Struct("<I")
_AGREED = ("protocol_version", "fingerprint", "dtype", "transport", "max_payload_bytes")


class Answer(msgspec.Struct, frozen=True):
    """The listener's word: its own hello, or why there will be no link."""

    hello: LinkHello | None = None
    refusal: str = ""


_encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(LinkHello).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


@dataclass(frozen=True)
class LinkOptions:
    """What a node brings to all of its links.

    max_payload_bytes: the largest message of the model and scheduler, the same on all nodes. store_*: the TCPStore,
    where links between hosts meet (unused by shared memory).
    """

    node: str
    index: int
    fingerprint: int
    dtype: str
    max_payload_bytes: int
    exchange: ExchangeConfig
    device: Literal["cpu", "cuda"] = "cpu"
    store_host: str = "127.0.0.1"
    store_port: int = 0

    def check(self) -> None:
        """Raises ConfigError when the configured transport cannot carry this node's tensors."""
        transport, device = self.exchange.transport, self.device
        if device == "cuda" and transport in ("shm", "gloo"):
            raise ConfigError(f"exchange.transport {transport} carries CPU tensors, cluster.device is cuda; use auto")
        if device == "cpu" and transport == "nccl":
            raise ConfigError(
                "exchange.transport nccl carries CUDA tensors, cluster.device is cpu; use auto, shm or gloo"
            )
        if device == "cuda" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise ConfigError("cluster.device cuda needs exchange.transport nccl, and torch has no CUDA with NCCL here")

    def hello(self, transport: str, link_id: str) -> LinkHello:
        return LinkHello(
            node=self.node,
            index=self.index,
            host_id=host_id(),
            fingerprint=self.fingerprint,
            dtype=self.dtype,
            protocol_version=VERSION,
            transport=transport,
            max_payload_bytes=self.max_payload_bytes,
            link_id=link_id,
        )

    def terms(self, peer: LinkHello) -> LinkTerms:
        return LinkTerms(peer.node, peer.index, peer.transport, self.max_payload_bytes, self.exchange.reply_timeout_s)


def host_id() -> str:
    """Equal for processes that share a running kernel, a hostname and a user, and so can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else ''}/{hostname()}/{os.getuid()}"


def encode_message(message: LinkHello | Answer) -> bytes:
    data = _encode(message)
    return LENGTH.pack(len(data)) + data


def message_length(prefix: bytes) -> int:
    """Bytes that follow the prefix. Raises ProtocolError, before anything is allocated, when there are too many."""
    length: int = LENGTH.unpack(prefix)[0]
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"link hello of {length} bytes, at most {MAX_MESSAGE_BYTES} are taken")
    return length


def check_agreement(mine: LinkHello, theirs: LinkHello, fields: Sequence[str] = _AGREED) -> None:
    """Raises ProtocolError that names every field in which the two differ, with both values."""
    faults = [
        f"{field} mismatch: {theirs.node} says {getattr(theirs, field)!r}, {mine.node} has {getattr(mine, field)!r}"
        for field in fields
        if getattr(theirs, field) != getattr(mine, field)
    ]
    if faults:
        raise ProtocolError("; ".join(faults))
