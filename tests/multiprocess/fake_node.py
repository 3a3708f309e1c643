"""A node without a model: speaks the start-up protocol, then misbehaves as the environment's FAKE_NAME tells.

Run as `fake_node.py ROLE --node NAME --controller ENDPOINT`, as the launcher runs real nodes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from moe_runtime.cluster.controller_client import ControllerClient
from moe_runtime.cluster.process import die_with_parent
from moe_runtime.protocol.control import ClusterStats, LinkAddress, RequestAddress, Shutdown


class FakeGateway(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["messages"][0]["content"] == "break":
            self._send("text/event-stream", 'data: {"error": {"message": "no more tokens"}}\n\n')
            return
        words = [body["model"], " says ", body["messages"][0]["content"]]
        deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in words), {}]
        events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
        self._send("text/event-stream", "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def bring_up(controller: ControllerClient, role: str) -> None:
    name = controller.node
    welcome = controller.hello(role)  # type: ignore[arg-type]
    assert os.environ["OMP_NUM_THREADS"] == str(welcome.threads)
    controller.progress(0.5, "loading half")
    if role == "ffn":
        assert welcome.placement is not None
        assert welcome.placement.nodes[welcome.index] == name
        controller.listening(LinkAddress(name, "host", "", "127.0.0.1", 1))
        controller.serving()
        return
    peers = controller.wait_peers()
    if role == "attention":
        assert [address.node for address in peers.ffn] == [f"f{i}" for i in range(welcome.config.cluster.ffn_nodes)]
        controller.serving(RequestAddress(name, "tcp://nowhere", 1024, 512))
        return
    assert [address.node for address in peers.attention] == [
        f"a{i}" for i in range(welcome.config.cluster.attention_nodes)
    ]
    server = ThreadingHTTPServer((welcome.config.gateway.host, welcome.config.gateway.port), FakeGateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    controller.serving(url=f"http://127.0.0.1:{server.server_port}")


def serve(controller: ControllerClient, behaviour: str) -> None:
    while True:
        controller.socket.poll(50)
        for message in controller.poll():
            if isinstance(message, Shutdown) and behaviour != "stubborn":
                print("drained", time.monotonic(), flush=True)
                return
            if isinstance(message, ClusterStats):
                assert set(message.nodes) == {"controller", "f0", "f1", "a0", "gateway0"}
        if controller.heartbeat_due():
            controller.heartbeat()
        if behaviour == "die_later":
            print("a line before dying", flush=True)
            sys.exit(4)


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--node", required=True)
    parser.add_argument("--controller", required=True)
    arguments = parser.parse_args()
    behaviour = os.environ.get(f"FAKE_{arguments.node}", "good")
    Path(os.environ["FAKE_PIDS"], arguments.node).write_text(str(os.getpid()))
    if behaviour == "die_at_start":
        print("\n".join(f"line {i}" for i in range(100)), flush=True)
        sys.exit(3)
    if behaviour == "has_child":
        child = subprocess.Popen(["sleep", "1000"])
        Path(os.environ["FAKE_PIDS"], "grandchild").write_text(str(child.pid))
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ControllerClient(arguments.node, arguments.controller) as controller:
        if behaviour == "fatal":
            controller.hello(arguments.role)
            controller.fatal("the weights do not fit")
            sys.exit(1)
        if behaviour == "never_ready":
            controller.hello(arguments.role)
            controller.progress(0.25, "stuck at layer 7")
            time.sleep(1000)
        bring_up(controller, arguments.role)
        serve(controller, behaviour)


if __name__ == "__main__":
    main()
