"""The wire header: it survives the trip, has a fixed size, and every mismatch names both values."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.header import HEADER_BYTES, MAGIC, VERSION, Header, Kind, PayloadType, expect, unpack


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


headers = st.builds(
    Header,
    kind=st.sampled_from(Kind), payload=st.sampled_from(PayloadType), sender=unsigned(16), lane=unsigned(16),
    layer=unsigned(16), epoch=unsigned(32), step=unsigned(32), tokens=unsigned(32), hidden=unsigned(32),
    picks=unsigned(32), payload_bytes=unsigned(64), clock=unsigned(64), fingerprint=unsigned(64), busy_us=unsigned(32),
)  # fmt: skip
EXAMPLE = Header(
    Kind.REPLY, PayloadType.BFLOAT16, sender=1, lane=2, layer=3, epoch=4, step=5, tokens=6, hidden=7, picks=8,
    payload_bytes=9, clock=10, fingerprint=11, busy_us=12,
)  # fmt: skip


@given(headers)
def test_round_trip(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert unpack(packed) == unpack(memoryview(packed)) == header


def test_the_layout_of_version_1() -> None:
    """Pinned bytes: to change them is to change VERSION."""
    assert VERSION == 1 and HEADER_BYTES == 64
    assert EXAMPLE.pack() == (
        b"MOEX" + struct.pack("<H", 1) + bytes([2, 2]) + struct.pack("<4H", 1, 2, 3, 0)
        + struct.pack("<6I", 4, 6, 7, 8, 5, 12) + struct.pack("<3Q", 10, 9, 11)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "<I", 0x12345678, f"magic mismatch: the message says {0x12345678}, this node has {MAGIC}"),
        (4, "<H", 9, "protocol version mismatch: the message says 9, this node has 1"),
        (6, "<B", 99, "99 is not a valid Kind"),
        (7, "<B", 98, "98 is not a valid PayloadType"),
        (14, "<H", 1, "flags mismatch: the message says 1, this node knows 0 and 2"),
    ],
)
def test_mismatches_name_both_values(offset: int, form: str, value: int, message: str) -> None:
    packed = bytearray(EXAMPLE.pack())
    struct.pack_into(form, packed, offset, value)
    with pytest.raises(ProtocolError, match=message):
        unpack(packed)


@pytest.mark.parametrize("size", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_wrong_length(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"{size} bytes, expected {HEADER_BYTES}"):
        unpack(bytes(size))


def test_expect() -> None:
    expect("layer", 3, 3)
    with pytest.raises(ProtocolError, match="layer mismatch: the message says 3, this node has 4"):
        expect("layer", 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payload_types(dtype: torch.dtype) -> None:
    assert PayloadType.of(dtype).dtype is dtype and not PayloadType.of(dtype).scaled
    assert PayloadType.of(dtype, "int8").dtype is torch.int8
    assert PayloadType.of(dtype, "fp8").dtype is torch.float8_e4m3fn
