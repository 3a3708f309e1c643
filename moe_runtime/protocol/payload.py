"""What follows a header: how each kind's tensors lie in one run of bytes.

Legend: T tokens, H hidden, K picks (top_k plus the shared expert). Parts start on ALIGNMENT boundaries.
DISPATCH: x_TH (payload type), slots_TK int32 (-1: that pick is on another node), weights_TK float32.
REPLY: y_TH (payload type), the weighted sum over the experts of one node. ERROR: UTF-8 text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.header import ALIGNMENT, Header, Kind


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


def dispatch_parts(frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
    """(x_TH, slots_TK, weights_TK) as views of a DISPATCH payload. Raises ProtocolError when sizes do not fit."""
    header = frame.header
    shape_TH, shape_TK = (header.tokens, header.hidden), (header.tokens, header.picks)
    x_TH, slots_TK, weights_TK = _views(
        frame, [(shape_TH, header.payload.dtype), (shape_TK, torch.int32), (shape_TK, torch.float32)]
    )
    return x_TH, slots_TK, weights_TK


def reply_part(frame: Frame) -> Tensor:
    """y_TH as a view of a REPLY payload. Raises ProtocolError when the size does not fit."""
    header = frame.header
    return _views(frame, [((header.tokens, header.hidden), header.payload.dtype)])[0]


def error_text(frame: Frame) -> str:
    return bytes(frame.payload.tolist()).decode("utf-8", errors="replace").rstrip("\0")


def error_reply(request: Header, message: str) -> tuple[Header, list[Tensor]]:
    """The ERROR answer to a request: the request's own header fields, so that the sender recognises it."""
    text = message.encode("utf-8") or b"?"
    # A transport leaves padding as it finds it, so the text brings its own zeros.
    part = torch.frombuffer(bytearray(text.ljust(aligned(len(text)), b"\0")), dtype=torch.uint8)
    return replace(request, kind=Kind.ERROR, payload_bytes=payload_size([part])), [part]


def _views(frame: Frame, layout: Sequence[tuple[tuple[int, int], torch.dtype]]) -> list[Tensor]:
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
