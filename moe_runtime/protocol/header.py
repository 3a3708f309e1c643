"""The fixed-size header in front of every tensor message, and the only place that packs or reads one.

A receiver checks a header and never overwrites it; every mismatch is an error that names both values.
"""

import enum
import struct
from dataclasses import dataclass

import torch

from moe_runtime.errors import ProtocolError

VERSION = 1
MAGIC = 0x58454F4D  # "MOEX"
_STRUCT = struct.Struct("<IHBBHHHHIIIIIIQQQ")
HEADER_BYTES = _STRUCT.size
# Payload parts start on this boundary, so that a view of any dtype is aligned.
ALIGNMENT = 64


# Flags: what a message is besides its kind.
SECOND_PART = 2  # the tokens that the layer's first message to this node had no room for


class Kind(enum.IntEnum):
    DISPATCH = 1
    REPLY = 2
    ERROR = 3


class PayloadType(enum.IntEnum):
    """What the hidden states travel as; the last two with a float32 scale per token."""

    FLOAT32 = 1
    BFLOAT16 = 2
    INT8 = 3
    FP8 = 4

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def scaled(self) -> bool:
        return self in (PayloadType.INT8, PayloadType.FP8)

    @classmethod
    def of(cls, dtype: torch.dtype, wire: str = "same") -> "PayloadType":
        """The type for activations of `dtype` under exchange.wire."""
        if wire != "same":
            return {"int8": cls.INT8, "fp8": cls.FP8}[wire]
        return {torch.float32: cls.FLOAT32, torch.bfloat16: cls.BFLOAT16}[dtype]


_DTYPES = {
    PayloadType.FLOAT32: torch.float32,
    PayloadType.BFLOAT16: torch.bfloat16,
    PayloadType.INT8: torch.int8,
    PayloadType.FP8: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Header:
    """One message: which lane's layer it belongs to, what it carries, and what both sides must agree on.

    sender: index of the attention node that owns the lane (also in replies). step: the lane's step number.
    clock: the lane's progress in layers (virtual time; in a reply, the least progress the FFN node knows of).
    tokens, hidden, picks: the payload's shape; on a GPU tokens is a bucket, not all of whose places are taken.
    payload_bytes: length of what follows. fingerprint: the model's hash.
    busy_us: in a reply, microseconds of expert computation that it waited for (the merged call's whole time).
    flags: SECOND_PART or 0; bit 0 says that adapter ids follow (none are sent yet, so it must be 0).
    """

    kind: Kind
    payload: PayloadType
    sender: int
    lane: int
    layer: int
    epoch: int
    step: int
    tokens: int
    hidden: int
    picks: int
    payload_bytes: int
    clock: int
    fingerprint: int
    busy_us: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return _STRUCT.pack( MAGIC, VERSION, self.kind, self.payload, self.sender, self.lane,
    self.layer, self.flags, self.epoch, self.tokens, self.hidden, self.picks, self.step, self.busy_us, self.clock,
    self.payload_bytes, self.fingerprint, )  # fmt: skip


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """Read a header. Raises ProtocolError when magic, version, kind, payload type or flags are not this version's."""
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"header has {len(data)} bytes, expected {HEADER_BYTES}")
    (magic, version, kind, payload, sender, lane, layer, flags, epoch,
     tokens, hidden, picks, step, busy_us, clock, payload_bytes, fingerprint) = _STRUCT.unpack(data)  # fmt: skip
    expect("magic", magic, MAGIC)
    expect("protocol version", version, VERSION)
    if flags not in (0, SECOND_PART):
        raise ProtocolError(f"flags mismatch: the message says {flags}, this node knows 0 and {SECOND_PART}")
    try:
        kind, payload = Kind(kind), PayloadType(payload)
    except ValueError as error:
        raise ProtocolError(f"header: {error}; known: {list(Kind)} and {list(PayloadType)}") from error
    return Header(
        kind, payload, sender, lane, layer, epoch, step, tokens, hidden, picks,
        payload_bytes, clock, fingerprint, busy_us, flags,
    )  # fmt: skip


def expect(what: str, got: object, expected: object) -> None:
    """Raise ProtocolError naming both values unless they are equal."""
    if got != expected:
        raise ProtocolError(f"{what} mismatch: the message says {got}, this node has {expected}")
