"""The gateway's side of the attention nodes: requests out, tokens in, and news of nodes that are gone (ZeroMQ)."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from moe_runtime.gateway.balance import Balancer
from moe_runtime.gateway.errors import ApiError
from moe_runtime.protocol.control import RequestAddress
from moe_runtime.protocol.messages import (
    Abort,
    RequestFailed,
    StepOutputs,
    Submit,
    TokenOutput,
    decode_from_attention,
    encode,
)

logger = logging.getLogger(__name__)

# One HTTP request's place for whatever its engine requests send back.
Mailbox = asyncio.Queue[TokenOutput | RequestFailed]


class EngineClient:
    """One DEALER socket per attention node; every submitted request ends in a last output, a failure or an abort."""

    def __init__(self, context: zmq.asyncio.Context, addresses: Sequence[RequestAddress]) -> None:
        self._capacities = {address.node: min(address.kv_tokens, address.max_context) for address in addresses}
        self._balancer = Balancer(self._capacities)
        self._alive = dict.fromkeys(self._capacities, False)
        self._connected = {node: asyncio.Event() for node in self._capacities}
        self._mailboxes: dict[str, Mailbox] = {}
        self._sockets = {address.node: _connect(context, address.endpoint) for address in addresses}

    @property
    def capacity(self) -> int:
        """The largest request, prompt and new tokens together, that some node can hold."""
        return max(self._capacities.values())

    @property
    def alive(self) -> Mapping[str, bool]:
        """Which nodes have a connection now."""
        return self._alive

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Tokens still to compute, per node."""
        return self._balancer.outstanding

    @property
    def open_requests(self) -> int:
        return len(self._mailboxes)

    async def run(self) -> None:
        """Take what the nodes send, until cancelled. Raises msgspec.DecodeError for a message that cannot be read."""
        async with asyncio.TaskGroup() as tasks:
            for node, (socket, monitor) in self._sockets.items():
                tasks.create_task(self._receive(socket))
                tasks.create_task(self._watch(node, monitor))

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait until every node has answered. Raises TimeoutError naming those that have not."""
        try:
            async with asyncio.timeout(timeout_s):
                for event in self._connected.values():
                    await event.wait()
        except TimeoutError as error:
            missing = ", ".join(node for node, alive in self._alive.items() if not alive)
            raise TimeoutError(f"no connection to attention node {missing} within {timeout_s:g} s") from error

    def submit(self, request: Submit, mailbox: Mailbox) -> None:
        """Send a request to the node with the least to do. Raises ApiError 503 if no living node can take it."""
        prompt_tokens, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
        node = self._balancer.place(request.request_id, prompt_tokens, max_tokens, self._alive)
        if node is None:
            raise ApiError(503, "no attention node that can hold this request is connected", code="unavailable")
        self._mailboxes[request.request_id] = mailbox
        if not self._send(node, encode(request)):
            self._forget(request.request_id)
            raise ApiError(503, f"attention node {node} takes no requests now", code="unavailable")

    def abort(self, request_id: str) -> None:
        """Free the request on its node; does nothing if it has ended."""
        if request_id in self._mailboxes:
            self._send(self._forget(request_id), encode(Abort(request_id)))

    def fail_all(self, message: str) -> None:
        """End every open request with an error, on the nodes too."""
        for request_id, mailbox in list(self._mailboxes.items()):
            mailbox.put_nowait(RequestFailed(request_id, "unavailable", message))
            self.abort(request_id)

    def close(self) -> None:
        for socket, monitor in self._sockets.values():
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=500)

    def _send(self, node: str, frame: bytes) -> bool:
        # Without blocking: pyzmq has tried by the time it returns, and the future is done.
        sent = self._sockets[node][0].send(frame, flags=zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        return not isinstance(sent.exception(), zmq.Again)

    def _forget(self, request_id: str) -> str:
        del self._mailboxes[request_id]
        return self._balancer.release(request_id)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = decode_from_attention(await socket.recv())
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    self._deliver(output)
            else:
                self._deliver(message)

    def _deliver(self, message: TokenOutput | RequestFailed) -> None:
        mailbox = self._mailboxes.get(message.request_id)
        if mailbox is None:
            return  # aborted while this was on its way
        mailbox.put_nowait(message)
        # Scores of a prompt's part do not mean that all of it is computed.
        if isinstance(message, TokenOutput) and message.token_ids:
            self._balancer.produced(message.request_id, len(message.token_ids))
        if isinstance(message, RequestFailed) or message.finish_reason is not None:
            self._forget(message.request_id)

    async def _watch(self, node: str, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._alive[node] = True
                self._connected[node].set()
            elif event == zmq.EVENT_DISCONNECTED:
                logger.warning("attention node %s closed its connection", node)
                self._alive[node] = False
                self._fail_node(node)

    def _fail_node(self, node: str) -> None:
        for request_id in self._balancer.requests_of(node):
            failure = RequestFailed(request_id, "internal", f"attention node {node} was lost")
            self._mailboxes[request_id].put_nowait(failure)
            self._forget(request_id)


def _connect(context: zmq.asyncio.Context, endpoint: str) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
    socket = context.socket(zmq.DEALER)
    # No limits, since a dropped token could not be made up for; requests bound the queues. IMMEDIATE: queue nothing
    # for a node that is not there.
    socket.set_hwm(0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    socket.connect(endpoint)
    return socket, monitor
