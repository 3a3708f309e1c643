"""A load of many event streams from one thread, with as little work per event as can be.

On few cores the client's own work is taken from the server's. So nothing is parsed but what tells a whole answer from
a broken one; bench/load.py is the client that looks at every token.
"""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvloop

_DONE = b"data: [DONE]\n\n"
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
# Holds the usage event and what follows it, however the bytes are cut into pieces.
_TAIL_BYTES = 2048


@dataclass(frozen=True)
class Run:
    """A load from its first request to its last token: seconds, output tokens, the client's own processor seconds."""

    seconds: float
    tokens: int
    client_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def run_streams(url: str, prompts: Sequence[str], max_tokens: int, timeout_s: float) -> Run:
    """Send all prompts at once, each over its own connection, greedy, to max_tokens each, and take every event.

    Raises RuntimeError if one is not answered whole, TimeoutError after timeout_s.
    """
    return uvloop.run(_run_streams(url, prompts, max_tokens, timeout_s))


async def _run_streams(url: str, prompts: Sequence[str], max_tokens: int, timeout_s: float) -> Run:
    loop = asyncio.get_running_loop()
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    async with asyncio.timeout(timeout_s):
        connections = await asyncio.gather(
            *(loop.create_connection(lambda: _Stream(loop), host, port) for _ in prompts)
        )
        requests = [_request(address.netloc, prompt, max_tokens) for prompt in prompts]
        cpu, start = time.process_time(), time.perf_counter()
        for (transport, _), request in zip(connections, requests, strict=True):
            transport.write(request)
        tokens = sum(await asyncio.gather(*(stream.tokens for _, stream in connections)))
        return Run(time.perf_counter() - start, tokens, time.process_time() - cpu)


def _request(host: str, prompt: str, max_tokens: int) -> bytes:
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


class _Stream(asyncio.Protocol):
    """One answer; `tokens` is how many the server says it has sent, once [DONE] has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.tokens: asyncio.Future[int] = loop.create_future()
        self._head = b""
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        if len(self._head) < _TAIL_BYTES:
            self._head += data
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if _DONE in self._tail and not self.tokens.done():
            counts = _TOKENS.findall(self._tail)
            if counts:
                self.tokens.set_result(int(counts[-1]))
            else:
                self._fail()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.tokens.done():
            self._fail()

    def _fail(self) -> None:
        began, ended = (part.decode(errors="replace") for part in (self._head[:300], self._tail[-600:]))
        self.tokens.set_exception(
            RuntimeError(f"a stream was not answered whole; it began {began!r} and ended {ended!r}")
        )
