"""Payload layout: parts come back as views on their boundaries, and a size that does not fit is refused.

Legend: T tokens, H hidden, K picks.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.header import ALIGNMENT, Header, Kind, PayloadType
from moe_runtime.protocol.payload import (
    Frame,
    aligned,
    dispatch_parts,
    error_reply,
    error_text,
    pack_into,
    payload_size,
    reply_part,
)


def make_frame(kind: Kind, payload: PayloadType, parts: list[Tensor], tokens: int, hidden: int, picks: int) -> Frame:
    size = payload_size(parts)
    buffer = torch.full((size,), 0xAA, dtype=torch.uint8)
    pack_into(buffer, parts)
    return Frame(Header(kind, payload, 0, 0, 0, 0, 0, tokens, hidden, picks, size, 0, 0), buffer)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(1, 40), st.integers(1, 9), st.sampled_from(PayloadType))
def test_dispatch_round_trip(tokens: int, hidden: int, picks: int, payload: PayloadType) -> None:
    x_TH = torch.randn(tokens, hidden).to(payload.dtype)
    slots_TK = torch.randint(-1, 100, (tokens, picks), dtype=torch.int32)
    weights_TK = torch.rand(tokens, picks)
    frame = make_frame(Kind.DISPATCH, payload, [x_TH, slots_TK, weights_TK], tokens, hidden, picks)
    for part, sent in zip(dispatch_parts(frame), (x_TH, slots_TK, weights_TK), strict=True):
        assert part.dtype == sent.dtype and torch.equal(part, sent)
        assert not part.numel() or (part.data_ptr() - frame.payload.data_ptr()) % ALIGNMENT == 0


def test_reply_is_a_view() -> None:
    y_TH = torch.randn(3, 5)
    frame = make_frame(Kind.REPLY, PayloadType.FLOAT32, [y_TH], 3, 5, 0)
    assert torch.equal(reply_part(frame), y_TH)
    assert reply_part(frame).data_ptr() == frame.payload.data_ptr()


@pytest.mark.parametrize(("tokens", "hidden"), [(4, 5), (3, 100), (0, 0)])
def test_a_shape_that_does_not_fit(tokens: int, hidden: int) -> None:
    frame = make_frame(Kind.REPLY, PayloadType.FLOAT32, [torch.zeros(3, 5)], 3, 5, 0)
    lying = replace(frame, header=replace(frame.header, tokens=tokens, hidden=hidden * 7))
    needed = aligned(tokens * hidden * 7 * 4)
    with pytest.raises(ProtocolError, match=f"64 bytes arrived, the header says 64, its shape needs {needed}"):
        reply_part(lying)


def test_a_length_that_does_not_fit() -> None:
    frame = make_frame(Kind.REPLY, PayloadType.FLOAT32, [torch.zeros(3, 5)], 3, 5, 0)
    with pytest.raises(ProtocolError, match="0 bytes arrived, the header says 64"):
        reply_part(replace(frame, payload=frame.payload[:0]))
    with pytest.raises(ProtocolError, match="64 bytes arrived, the header says 128"):
        dispatch_parts(replace(frame, header=replace(frame.header, payload_bytes=128)))


@pytest.mark.parametrize("message", ["epoch 3, expected 4", "Zürich \u2603", "", "x" * 1000])
def test_error_reply_keeps_the_requests_fields(message: str) -> None:
    request = Header(Kind.DISPATCH, PayloadType.BFLOAT16, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    answer, parts = error_reply(request, message)
    assert replace(answer, kind=request.kind, payload_bytes=request.payload_bytes) == request
    buffer = torch.zeros(answer.payload_bytes, dtype=torch.uint8)
    pack_into(buffer, parts)
    assert error_text(Frame(answer, buffer)) == (message or "?")


def test_an_error_text_with_stale_padding() -> None:
    """Padding is not zeroed on the wire, so the text must not depend on it."""
    answer, parts = error_reply(Header(Kind.DISPATCH, PayloadType.FLOAT32, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), "stale")
    buffer = torch.full((answer.payload_bytes,), ord("z"), dtype=torch.uint8)
    pack_into(buffer, parts)
    assert error_text(Frame(answer, buffer)) == "stale"
