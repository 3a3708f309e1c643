"""The gateway as a process of the cluster: start-up with the controller, heartbeats, draining, and never an orphan."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from moe_runtime.errors import LinkClosedError
from moe_runtime.gateway.app import create_app
from moe_runtime.gateway.auth import load_keys
from moe_runtime.gateway.engine_client import EngineClient
from moe_runtime.gateway.http_server import HttpServer, bind, make_server, url_of
from moe_runtime.gateway.metrics import GatewayMetrics
from moe_runtime.gateway.prompts import PromptEncoder
from moe_runtime.gateway.sampling import Limits
from moe_runtime.gateway.service import Service
from moe_runtime.gateway.tokenizer import TextTokenizer
from moe_runtime.models.spec import ModelSpec
from moe_runtime.protocol.control import (
    ClusterStats,
    Fatal,
    Heartbeat,
    Hello,
    Peers,
    Progress,
    Sample,
    Serving,
    ToController,
    Welcome,
    decode_from_controller,
    encode,
)

logger = logging.getLogger(__name__)

_WELCOME_TIMEOUT_S = 60.0
_ENGINE_CONNECT_TIMEOUT_S = 10.0
_PARENT_CHECK_S = 0.5
_START_CHECK_S, _DRAIN_CHECK_S = 0.01, 0.05
# Without word from the controller: ill after the first, given up after the second (both in heartbeats, and a floor).
_STALE_HEARTBEATS, _STALE_FLOOR_S = 10, 5.0
_LOST_HEARTBEATS, _LOST_FLOOR_S = 60, 60.0
_LINGER_MS = 1000
# A large JSON body makes a million objects and no garbage: look less often.
_GC_THRESHOLDS = (20_000, 20, 50)
# How long a thread may run Python before the event loop gets its turn; Python's own 5 ms add up over a loop's turns.
_SWITCH_S = 0.001
# Of drain_timeout_s, which the launcher gives all nodes together: for open requests, and then for their last bytes.
_DRAIN_SHARE, _FLUSH_SHARE = 0.75, 0.1


class GatewayNode:
    """One gateway process. run() gives its exit code."""

    def __init__(self, node: str, controller: str) -> None:
        self._node = node
        self._context = zmq.asyncio.Context()
        self._controller = self._context.socket(zmq.DEALER)
        self._controller.setsockopt(zmq.IDENTITY, node.encode())
        self._controller.connect(controller)
        self._parent = os.getppid()
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._peers: asyncio.Future[Peers] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._patient = True
        self._metrics = GatewayMetrics(node, self._samples)
        self._service: Service | None = None
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until told to stop. An error is reported to the controller, then the exit code is 1."""
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, self._hurry)
        try:
            await self._run_tasks()
        except Exception as error:
            logger.exception("the gateway cannot go on")
            with contextlib.suppress(LinkClosedError):
                self._send(Fatal(self._node, "; ".join(_messages(error))))
            return 1
        finally:
            if self._service is not None:
                self._service.encoder.close()
                self._service.engine.close()
            self._context.destroy(linger=_LINGER_MS)
        return 0

    async def _run_tasks(self) -> None:
        """Everything that runs at once; the first failure ends it all."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._receive()), tasks.create_task(self._watch_parent())]
            start = tasks.create_task(self._start(tasks, background))
            stop = tasks.create_task(self._stop.wait())
            await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                await stop
                await self._drain()
            for task in (start, *background):
                task.cancel()

    async def _start(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> None:
        self._send(Hello(self._node, "gateway", os.getpid()))
        welcome = await self._welcome
        background.append(tasks.create_task(self._beat(welcome.config.cluster.heartbeat_s)))
        keys = load_keys(welcome.config.gateway.api_key_file, os.environ)
        listener = bind(welcome.config.gateway)
        self._send(Progress(self._node, 0.0, "loading the tokenizer"))
        tokenizer = await asyncio.to_thread(TextTokenizer, Path(welcome.model_dir))
        self._send(Progress(self._node, 1.0, "waiting for the attention nodes"))
        engine = EngineClient(self._context, (await self._peers).attention)
        background.append(tasks.create_task(engine.run()))
        await engine.wait_connected(_ENGINE_CONNECT_TIMEOUT_S)
        self._service = self._make_service(welcome, tokenizer, engine)
        app = create_app(self._service, keys)
        self._server = make_server(app, _FLUSH_SHARE * welcome.config.cluster.drain_timeout_s)
        _favour_the_event_loop()
        self._serving = tasks.create_task(self._server.serve(sockets=[listener]))
        background.append(self._serving)
        while not self._server.started:
            await asyncio.sleep(_START_CHECK_S)
        self._send(Serving(self._node, url=url_of(listener)))

    def _make_service(self, welcome: Welcome, tokenizer: TextTokenizer, engine: EngineClient) -> Service:
        config, spec = welcome.config, msgspec.msgpack.decode(welcome.spec, type=ModelSpec)
        limits = Limits(engine.capacity, config.gateway.max_tokens_default, spec.vocab, spec.eos_ids)
        return Service(
            models=(config.model.served_name or config.model.path, *config.model.aliases),
            limits=limits,
            max_body_bytes=config.gateway.max_body_bytes,
            max_open_requests=config.gateway.max_open_requests,
            request_timeout_s=config.gateway.request_timeout_s,
            stale_after_s=max(_STALE_FLOOR_S, _STALE_HEARTBEATS * config.cluster.heartbeat_s),
            tokenizer=tokenizer,
            encoder=PromptEncoder(tokenizer, limits),
            engine=engine,
            metrics=self._metrics,
        )

    def _hurry(self) -> None:
        """A signal: stop without waiting for open requests."""
        self._patient = False
        self._stop.set()

    async def _drain(self) -> None:
        """Refuse new requests, give the open ones time, then end them with an error and stop the server."""
        assert self._service and self._server and self._serving, "draining before serving"
        self._service.draining = True
        engine = self._service.engine
        deadline = time.monotonic() + _DRAIN_SHARE * self._welcome.result().config.cluster.drain_timeout_s
        while self._patient and engine.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_CHECK_S)
        engine.fail_all("the server is shutting down")
        self._server.should_exit = True
        await self._serving

    async def _receive(self) -> None:
        while True:
            limit_s = self._silence_limit_s()
            try:
                async with asyncio.timeout(limit_s):
                    message = decode_from_controller(await self._controller.recv())
            except TimeoutError as error:
                raise LinkClosedError(f"nothing heard from the controller for {limit_s:g} s") from error
            if isinstance(message, Welcome):
                self._welcome.set_result(message)
            elif isinstance(message, Peers):
                self._peers.set_result(message)
            elif isinstance(message, ClusterStats):
                self._metrics.nodes.update(message.nodes)
            else:
                self._stop.set()

    def _silence_limit_s(self) -> float:
        if not self._welcome.done():
            return _WELCOME_TIMEOUT_S
        cluster = self._welcome.result().config.cluster
        if not self._peers.done():
            return cluster.startup_timeout_s
        return max(_LOST_FLOOR_S, _LOST_HEARTBEATS * cluster.heartbeat_s)

    async def _beat(self, interval_s: float) -> None:
        while True:
            self._send(Heartbeat(self._node, self._samples()))
            await asyncio.sleep(interval_s)

    async def _watch_parent(self) -> None:
        while os.getppid() == self._parent:
            await asyncio.sleep(_PARENT_CHECK_S)
        raise LinkClosedError("the process that started the gateway is gone")

    def _samples(self) -> tuple[Sample, ...]:
        if self._service is None:
            return ()
        engine = self._service.engine
        return (
            Sample("gateway_open_requests", "gauge", engine.open_requests),
            *(
                Sample("gateway_outstanding_tokens", "gauge", tokens, {"attention_node": node})
                for node, tokens in engine.outstanding.items()
            ),
        )

    def _send(self, message: ToController) -> None:
        # Without blocking: pyzmq has tried by the time it returns, and the future is done.
        sent = self._controller.send(encode(message), flags=zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        if sent.exception() is not None:
            raise LinkClosedError("the controller takes no messages") from sent.exception()


def _favour_the_event_loop() -> None:
    """Settings of the whole process that shorten the pauses which one request makes for all others."""
    # Libraries' objects stay: to look at them again in search of garbage takes a tenth of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_S)


def _messages(error: BaseException) -> Sequence[str]:
    if isinstance(error, BaseExceptionGroup):
        return [message for part in error.exceptions for message in _messages(part)]
    return [str(error) or type(error).__name__]
