"""One HTTP connection: what is no HTTP is refused in the form of every other error, and silence ends it."""

import asyncio
import sys

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from moe_runtime.gateway.error_answers import error_answer
from moe_runtime.gateway.errors import ApiError
from moe_runtime.gateway.request_ids import HEADER, head_too_large, new_request_id


class GatewayProtocol(H11Protocol):
    """uvicorn's connection, whose timeout_keep_alive here bounds every wait for a whole request head."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head(self.loop.time() + self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        timer = self.timeout_keep_alive_task
        super().data_received(data)
        # Half a request head must not stop the clock that uvicorn stops with the first byte.
        answering = self.cycle is not None and not self.cycle.response_complete
        if timer is not None and self.timeout_keep_alive_task is None and not answering:
            self._expect_head(timer.when())

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 could not read; it says if that is for its size."""
        fault = sys.exception()
        too_large = isinstance(fault, h11.RemoteProtocolError) and fault.error_status_hint == 431
        error = head_too_large() if too_large else ApiError(400, f"{msg} ({fault})")
        if self.cycle is not None:
            # The application may not answer any more; it learns why when the connection is closed.
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_answer(error)
            own = [(b"connection", b"close"), (HEADER.encode(), new_request_id().encode())]
            head = h11.Response(
                status_code=error.status, headers=[*answer.raw_headers, *own], reason=STATUS_PHRASES[error.status]
            )
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_head(self, deadline: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_at(deadline, self.timeout_keep_alive_handler)
