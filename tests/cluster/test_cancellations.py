"""200 requests at once, many of whose clients leave at a random moment: nothing is left of any of them."""

import random
import threading
import time
from pathlib import Path

from openai import APIError, APITimeoutError

from tests.cluster.client import metric, openai_client
from tests.cluster.reference import prompts
from tests.cluster.settings import Setting, cluster

REQUESTS = 200


def test_cancelled_requests_leave_nothing(demo_dir: Path) -> None:
    outcomes: list[str] = []
    with cluster(Setting(2, 3, lanes=2, small_pool=True)) as server:
        threads = [threading.Thread(target=_request, args=(server.url, i, outcomes)) for i in range(REQUESTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert sorted(set(outcomes)) == ["done", "left"], set(outcomes)
        assert len(outcomes) == REQUESTS
        _wait_until_empty(server.url)
        assert _nodes_of(server.pid)
    assert _nodes_of(server.pid) == []
    assert not Path(f"/proc/{server.pid}").exists()


def _request(url: str, index: int, outcomes: list[str]) -> None:
    draw = random.Random(index)
    # A third stays to the end, a third hangs up while it waits for a first token, a third in the middle of the stream.
    kind = ("stays", "hangs up", "leaves")[index % 3]
    patience = 15 * draw.random() if kind == "hangs up" else 240
    try:
        with openai_client(url) as client:
            stream = client.completions.create(
                model="demo",
                prompt=prompts()[index % len(prompts())],
                max_tokens=draw.randint(4, 24),
                stream=True,
                timeout=patience,
            )
            for position, _ in enumerate(stream):
                if kind == "leaves" and position == draw.randint(0, 3):
                    stream.close()
                    outcomes.append("left")
                    return
            outcomes.append("done")
    except APITimeoutError:
        outcomes.append("left" if kind == "hangs up" else "timed out")
    except APIError as error:
        outcomes.append(f"{type(error).__name__}: {error}")


def _wait_until_empty(url: str) -> None:
    deadline = time.monotonic() + 60
    left: dict[str, float] = {}
    while time.monotonic() < deadline:
        names = ("kv_blocks_held", "requests_running", "requests_waiting")
        left = {f"{name}{node}": value for name in names for node, value in metric(url, name).items()}
        if left and not any(left.values()):
            return
        time.sleep(0.5)
    raise AssertionError(f"still held a minute after the last client left: {left}")


def _nodes_of(launcher: int) -> list[int]:
    """Living processes that this launcher started, by the mark in their environment."""
    mark = f"MOE_RUNTIME_PARENT_PID={launcher}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in environment:
                found.append(int(entry.name))
    return found
