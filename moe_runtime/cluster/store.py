"""The rendezvous store of torch.distributed, held by the controller; links between hosts meet there."""

import socket
from datetime import timedelta

import torch.distributed as dist


class RendezvousStore:
    """A TCPStore server on a free port of `host` only (left alone, TCPStore would listen on every interface)."""

    def __init__(self, host: str, timeout_s: float) -> None:
        listener = socket.create_server((host, 0))
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # exported, but not by name
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
