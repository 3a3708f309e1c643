"""The Transport contract: one Link per (attention node, FFN node) pair, whatever carries the bytes.

Who calls what: an FFN node owns a Listener and accepts; an attention node connects. Both put fileno() into their one
poll set and read only when it is ready, so nobody polls in a loop and one dead peer harms one link.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
from torch import Tensor

from moe_runtime.protocol.header import Header
from moe_runtime.protocol.payload import Frame


class LinkHello(msgspec.Struct, frozen=True):
    """What both ends of a new link must agree on, sent by the connecting side and answered in kind."""

    node: str
    index: int
    host_id: str
    fingerprint: int
    dtype: str
    protocol_version: int
    transport: str
    max_payload_bytes: int
    link_id: str


class Link(ABC):
    """One ordered channel in both directions. Used by one thread."""

    peer: str
    peer_index: int
    transport: str

    @abstractmethod
    def fileno(self) -> int:
        """Readable when receive() may return a frame or the peer is gone."""

    @abstractmethod
    def send(self, header: Header, parts: Sequence[Tensor]) -> None:
        """Send a header with header.payload_bytes == payload_size(parts); the parts may be reused on return.

        Raises LinkClosedError when the peer is gone, LinkTimeoutError when it makes no room within
        exchange.reply_timeout_s, ValueError when the payload exceeds the agreed max_payload_bytes or is not the
        header's. After a LinkTimeoutError the link can only be closed.
        """

    @abstractmethod
    def receive(self) -> Frame | None:
        """The next whole frame, or None when none is here yet; never waits for a frame to begin.

        Between hosts a frame that has begun is waited for, at most exchange.reply_timeout_s (LinkTimeoutError).
        Raises LinkClosedError when the peer is gone, ProtocolError when the bytes are no valid frame; afterwards the
        link can only be closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; the peer notices, after the frames that were sent. Never raises, may be called twice.

        Between hosts it waits up to exchange.close_timeout_s for frames under way that the peer has not read.
        """


class Listener(ABC):
    """The accepting end of an FFN node."""

    @abstractmethod
    def fileno(self) -> int:
        """Readable when accept() may return a link."""

    @abstractmethod
    def accept(self) -> Link | None:
        """A new link whose hello matched, or None (nothing there, or a peer that was refused and told why)."""

    @abstractmethod
    def close(self) -> None:
        """Stop accepting; links live on."""
