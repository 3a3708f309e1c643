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
    hidden_parts,
    pack_into,
    payload_size,
    reply_part,
    slots_part,
)


def make_frame(kind: Kind, payload: PayloadType, parts: list[Tensor], tokens: int, hidden: int, picks: int) -> Frame:
    size = payload_size(parts)
    buffer = torch.full((size,), 0xAA, dtype=torch.uint8)
    pack_into(buffer, parts)
    return Frame(Header(kind, payload, 0, 0, 0, 0, 0, tokens, hidden, picks, size, 0, 0), buffer)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(1, 40), st.integers(1, 9), st.sampled_from(PayloadType))
def test_dispatch_round_trip(tokens: int, hidden: int, picks: int, payload: PayloadType) -> None:
    dtype = torch.float32 if payload.scaled else payload.dtype
    x_TH = torch.randn(tokens, hidden).to(dtype)
    slots_TK = torch.randint(-1, 100, (tokens, picks), dtype=torch.int32)
    weights_TK = torch.rand(tokens, picks)
    parts = [*hidden_parts(x_TH, payload), slots_TK, weights_TK]
    frame = make_frame(Kind.DISPATCH, payload, parts, tokens, hidden, picks)
    received = dispatch_parts(frame, dtype)
    for part, sent in zip(received[payload.scaled :], (x_TH, slots_TK, weights_TK)[payload.scaled :], strict=True):
        assert part.dtype == sent.dtype and torch.equal(part, sent)
        assert not part.numel() or (part.data_ptr() - frame.payload.data_ptr()) % ALIGNMENT == 0
    step_TH = {PayloadType.INT8: x_TH.abs().amax(-1, keepdim=True) / 254, PayloadType.FP8: x_TH.abs() / 16 + 1e-4}
    assert bool(((received[0] - x_TH).abs() <= step_TH.get(payload, torch.zeros(())) * 1.001).all())
    assert torch.equal(slots_part(frame), slots_TK)


@pytest.mark.parametrize("payload", [PayloadType.INT8, PayloadType.FP8])
def test_a_token_travels_the_same_whatever_is_sent_with_it(payload: PayloadType) -> None:
    x_TH = torch.randn(6, 40) * torch.tensor([1.0, 1e4, 1e-6, 0.0, 3.0, 1e20])[:, None]
    together = hidden_parts(x_TH, payload)
    for row in range(6):
        alone = hidden_parts(x_TH[row : row + 1], payload)
        assert all(torch.equal(a.float(), b[row : row + 1].float()) for a, b in zip(alone, together, strict=True))
    values_TH, scales_T1 = together
    back_TH = values_TH.float() * scales_T1
    assert bool(back_TH.isfinite().all()) and not back_TH[3].any()


def test_reply_is_a_view() -> None:
    y_TH = torch.randn(3, 5)
    frame = make_frame(Kind.REPLY, PayloadType.FLOAT32, [y_TH], 3, 5, 0)
    assert torch.equal(reply_part(frame, torch.float32), y_TH)
    assert reply_part(frame, torch.float32).data_ptr() == frame.payload.data_ptr()


@pytest.mark.parametrize(("tokens", "hidden"), [(4, 5), (3, 100), (0, 0)])
def test_a_shape_that_does_not_fit(tokens: int, hidden: int) -> None:
    frame = make_frame(Kind.REPLY, PayloadType.FLOAT32, [torch.zeros(3, 5)], 3, 5, 0)
    lying = replace(frame, header=replace(frame.header, tokens=tokens, hidden=hidden * 7))
    needed = aligned(tokens * hidden * 7 * 4)
    with pytest.raises(ProtocolError, match=f"64 bytes arrived, the header says 64, its shape needs {needed}"):
        reply_part(lying, torch.float32)


def test_a_length_that_does_not_fit() -> None:
    frame = make_frame(Kind.REPLY, PayloadType.FLOAT32, [torch.zeros(3, 5)], 3, 5, 0)
    with pytest.raises(ProtocolError, match="0 bytes arrived, the header says 64"):
        reply_part(replace(frame, payload=frame.payload[:0]), torch.float32)
    with pytest.raises(ProtocolError, match="64 bytes arrived, the header says 128"):
        dispatch_parts(replace(frame, header=replace(frame.header, payload_bytes=128)), torch.float32)


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
