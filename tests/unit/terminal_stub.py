"""A small OpenAI-compatible server, good or bad as a test asks: it keeps what it gets and answers as scripted."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[BaseHTTPRequestHandler], None]


def reply(status: int, body: Any, content_type: str = "application/json") -> Script:
    """A whole answer; a text is sent as it is."""

    def script(handler: BaseHTTPRequestHandler) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return script


def events(*chunks: Any, then: Script = lambda handler: None) -> Script:
    """A stream of these chunks (a text: written as it is), closed after `then`."""

    def script(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for chunk in chunks:
            text = chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n"
            handler.wfile.write(text.encode())
            handler.wfile.flush()
        then(handler)

    return script


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    """A chunk of /v1/completions."""
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk of /v1/chat/completions."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


DONE = "data: [DONE]\n\n"
MODELS = {"object": "list", "data": [{"id": "first"}, {"id": "second"}]}


class Stub:
    """scripts: by path; received: (path, Authorization, body) of every request."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.scripts: dict[str, Script] = {"/v1/models": reply(200, MODELS)}
        self.received: list[tuple[str, str | None, Any]] = []


@contextmanager
def serving() -> Iterator[Stub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(content) if content else None
            stub.received.append((self.path, self.headers.get("Authorization"), body))
            stub.scripts.get(self.path, reply(404, {"error": {"message": f"no {self.path}"}}))(self)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub = Stub(server.server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
