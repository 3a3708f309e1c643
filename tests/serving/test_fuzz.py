"""A thousand requests of random shape from 64 clients: every answer right or a documented error, nothing left over."""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from moe_runtime.bench.processes import NodeProcess
from tests.serving.answers import whole_answer
from tests.serving.fuzz_client import Client, Known, choose
from tests.serving.fuzz_requests import valid_request
from tests.serving.server import Server

SEED = 20
POOL, REQUESTS, CLIENTS = 60, 1000, 64
# Caches fill up and allocators keep what they had; what leaks a little with each request is far beyond this.
GROWTH_BYTES = 64 << 20
# Pools start their threads when there is first enough to do.
POOL_THREADS = 4
RUN_TIMEOUT_S = 300.0


@dataclass
class Log:
    """What came of the requests: counts by kind and outcome, and faults in full."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def test_a_thousand_requests_of_random_shape(server: Server) -> None:
    pool = [_answered(server, index) for index in range(POOL)]
    _run(server, pool, range(CLIENTS, 0, -1), Log())
    server.wait_empty()
    before = {name: _use(node) for name, node in server.nodes.items()}
    preemptions = server.total("preemptions_total")
    log, start = Log(), time.monotonic()
    _run(server, pool, range(1000, 1000 + REQUESTS), log)
    seconds = time.monotonic() - start
    server.wait_empty()
    for kind, times in sorted(log.outcomes.items()):
        print(f"{times:5d} {kind}")
    preempted = server.total("preemptions_total") - preemptions
    print(f"{REQUESTS} requests from {CLIENTS} clients in {seconds:.1f} s, {preempted:.0f} preemptions")
    assert not log.faults, "\n".join([f"{len(log.faults)} faults", *log.faults[:10]])
    assert sum(log.outcomes.values()) == REQUESTS
    assert preempted > 0, "the pool was too large for this test"
    for name, node in server.nodes.items():
        _assert_no_growth(before[name], node)


def _answered(server: Server, index: int) -> Known:
    """A valid request with the answer that it gets when nothing runs beside it."""
    request = valid_request(random.Random(f"{SEED}, valid {index}"))
    reply = server.call(request.path, request.body)
    assert reply.status == 200, (request, reply.content[:300])
    return Known(request, whole_answer(reply.json))


def _run(server: Server, pool: list[Known], numbers: range, log: Log) -> None:
    """Every number is a request, drawn from it alone; the clients take them in turn."""
    remaining, lock = iter(numbers), threading.Lock()

    def work(client: Client, draw: random.Random) -> None:
        while True:
            with lock:
                number = next(remaining, None)
            if number is None:
                client.close()
                return
            draw.seed(f"{SEED}, request {number}")
            kind, act = choose(draw, client, pool)
            try:
                outcome = f"{kind}: {act()}"
            except Exception as error:  # noqa: BLE001 - whatever went wrong is this test's finding
                client.close()
                outcome = f"{kind}: fault"
                log.faults.append(f"request {number}, {kind}: {type(error).__name__}: {error}")
            with lock:
                log.outcomes[outcome] += 1

    threads = []
    for _ in range(CLIENTS):
        draw = random.Random()
        threads.append(threading.Thread(target=work, args=(Client(server.url, draw), draw), daemon=True))
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RUN_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    waiting = sum(thread.is_alive() for thread in threads)
    assert not waiting, "\n".join([f"{waiting} clients still wait after {RUN_TIMEOUT_S:g} s", *log.faults[:10]])


def _use(node: NodeProcess) -> tuple[int, int, int]:
    return node.open_files, node.threads, node.resident_bytes


def _assert_no_growth(before: tuple[int, int, int], node: NodeProcess) -> None:
    files, threads, resident = before
    for attempt in count():
        now = _use(node)
        if now[0] <= files and now[1] <= threads + POOL_THREADS:
            break
        assert attempt < 50, f"{node.name}: {now[0]} open files, {now[1]} threads, before {files} and {threads}"
        time.sleep(0.1)
    assert now[2] - resident < GROWTH_BYTES, f"{node.name} has grown from {resident} to {now[2]} bytes"
