"""Tensors between attention and FFN nodes: one contract (base), one link (channel), three kinds of payload plane."""

from moe_runtime.transport.base import Link, LinkHello, Listener
from moe_runtime.transport.connect import connect
from moe_runtime.transport.handshake import LinkOptions, host_id
from moe_runtime.transport.listener import LinkListener

__all__ = ["Link", "LinkHello", "LinkListener", "LinkOptions", "Listener", "connect", "host_id"]
