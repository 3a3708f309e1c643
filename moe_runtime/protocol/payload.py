"""What follows a header: how each kind's tensors lie in one run of bytes.

Legend: T tokens, H hidden, K picks (top_k plus the shared expert). Parts start on ALIGNMENT boundaries.
DISPATCH: x_TH (payload type), slots_TK int32 (-1: that pick is on another node), weights_TK float32.
REPLY: y_TH (payload type), the weighted sum over the experts of one node. ERROR: UTF-8 text.
With a scaled payload type, float32 scales_T1 follow the hidden states: each token is quantized symmetrically by its
largest number, so that it travels the same whatever is sent with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.header import ALIGNMENT, Header, Kind, PayloadType

Part = tuple[tuple[int, int], torch.dtype]
# The largest number that a scaled payload type holds.
_TOP = {PayloadType.INT8: 127.0, PayloadType.FP8: 448.0}


@dataclass(frozen=True)
class Frame:
    """A received message: the header as it came, and its payload as uint8 [payload_bytes] owned by the receiver."""

    header: Header
    payload: Tensor


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def payload_size(parts: Sequence[Tensor]) -> int:
    """Bytes that the parts take on the wire, padding included."""
    return sum(aligned(part.nbytes) for part in parts)


def pack_into(buffer: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy contiguous parts into a uint8 buffer of payload_size(parts) bytes, each on its boundary."""
    offset = 0
    for part in parts:
        if part.nbytes:
            buffer[offset : offset + part.nbytes].copy_(part.reshape(-1).view(torch.uint8))
        offset += aligned(part.nbytes)


def hidden_parts(x_TH: Tensor, payload: PayloadType) -> list[Tensor]:
    """Hidden states as they travel: themselves, or values with a scale per token."""
    if not payload.scaled:
        return [x_TH]
    top = _TOP[payload]
    # A token of zeros has scale 1: no division by zero, no NaN at the other end.
    most_T1 = x_TH.abs().amax(-1, keepdim=True).float()
    scales_T1 = torch.where(most_T1 == 0, 1.0, most_T1 / top)
    scaled_TH = (x_TH / scales_T1).clamp_(-top, top)
    return [(scaled_TH.round_() if payload is PayloadType.INT8 else scaled_TH).to(payload.dtype), scales_T1]


def dispatch_parts(frame: Frame, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(x_TH in dtype, slots_TK, weights_TK) of a DISPATCH payload, views where nothing has to be converted.

    Raises ProtocolError when sizes do not fit.
    """
    *hidden, slots_TK, weights_TK = _views(frame, _dispatch_layout(frame.header))
    return _hidden(hidden, dtype), slots_TK, weights_TK


def reply_part(frame: Frame, dtype: torch.dtype) -> Tensor:
    """y_TH of a REPLY payload in dtype, a view where nothing has to be converted. Raises ProtocolError."""
    return _hidden(_views(frame, _hidden_layout(frame.header)), dtype)


def slots_part(frame: Frame) -> Tensor:
    """slots_TK of a DISPATCH payload, a view. Raises ProtocolError when sizes do not fit."""
    return _views(frame, _dispatch_layout(frame.header))[-2]


def _dispatch_layout(header: Header) -> list[Part]:
    shape_TK = (header.tokens, header.picks)
    return [*_hidden_layout(header), (shape_TK, torch.int32), (shape_TK, torch.float32)]


def _hidden_layout(header: Header) -> list[Part]:
    values: Part = ((header.tokens, header.hidden), header.payload.dtype)
    return [values, ((header.tokens, 1), torch.float32)] if header.payload.scaled else [values]


def _hidden(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if len(parts) == 1:
        return parts[0].to(dtype)
    values_TH, scales_T1 = parts
    return (values_TH.float() * scales_T1).to(dtype)


def error_text(frame: Frame) -> str:
    return bytes(frame.payload.tolist()).decode("utf-8", errors="replace").rstrip("\0")


def error_reply(request: Header, message: str) -> tuple[Header, list[Tensor]]:
    """The ERROR answer to a request: the request's own header fields, so that the sender recognises it."""
    text = message.encode("utf-8") or b"?"
    # A transport leaves padding as it finds it, so the text brings its own zeros.
    part = torch.frombuffer(bytearray(text.ljust(aligned(len(text)), b"\0")), dtype=torch.uint8)
    return replace(request, kind=Kind.ERROR, payload_bytes=payload_size([part])), [part]


def _views(frame: Frame, layout: Sequence[Part]) -> list[Tensor]:
    sizes = [rows * columns * dtype.itemsize for (rows, columns), dtype in layout]
    expected = sum(aligned(size) for size in sizes)
    if not frame.header.payload_bytes == expected == frame.payload.numel():
        raise ProtocolError(
            f"payload size mismatch: {frame.payload.numel()} bytes arrived, the header says "
            f"{frame.header.payload_bytes}, its shape needs {expected}"
        )
    views, offset = [], 0
    for (shape, dtype), size in zip(layout, sizes, strict=True):
        views.append(frame.payload[offset : offset + size].view(dtype).view(shape))
        offset += aligned(size)
    return views
