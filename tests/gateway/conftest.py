"""One real gateway process over two fake attention nodes, shared by the tests of this folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from fake_controller import FakeController, GatewayProcess, make_config, make_spec, wait_until
from fake_engine import Answer, FakeEngine
from tiny_tokenizer import EOS, VOCAB, ids, write_tokenizer

from moe_runtime.protocol.messages import Submit


@dataclass
class Cluster:
    """The process, its neighbours, and clients for it."""

    url: str
    engines: list[FakeEngine]
    controller: FakeController
    process: GatewayProcess
    openai: openai.OpenAI
    http: httpx.Client

    @property
    def submitted(self) -> list[Submit]:
        return [submit for engine in self.engines for submit in engine.submitted]

    @property
    def aborted(self) -> list[str]:
        return [request_id for engine in self.engines for request_id in engine.aborted]

    @property
    def open(self) -> list[str]:
        return [request_id for engine in self.engines for request_id in list(engine.open)]

    def script(self, script: Callable[[Submit], Answer]) -> None:
        for engine in self.engines:
            engine.script = script

    def says(self, text: str, finish: str = "length", per_step: int = 1) -> None:
        """Every request is answered with this text, then end-of-text if finish is `stop`."""
        tokens = [*ids(text), *([EOS] if finish == "stop" else [])]
        steps = [tuple(tokens[start : start + per_step]) for start in range(0, len(tokens), per_step)]
        self.script(lambda submit: Answer(steps, finish))

    def hold(self, held: bool = True, step_s: float = 0.0) -> None:
        for engine in self.engines:
            engine.held, engine.step_s = held, step_s


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def shared_cluster(model_dir: Path) -> Iterator[Cluster]:
    engines = [FakeEngine("a0"), FakeEngine("a1")]
    addresses = tuple(engine.start() for engine in engines)
    controller = FakeController(make_config(), model_dir, make_spec(VOCAB, (EOS,)), addresses)
    process = GatewayProcess(controller)
    try:
        url = process.wait_serving()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        with httpx.Client(base_url=url, timeout=30) as http, client:
            yield Cluster(url, engines, controller, process, client, http)
        assert process.process.poll() is None, "the gateway did not survive its tests"
        log = process.close()
        assert "Traceback" not in log, log
    finally:
        process.close()
        controller.close()
        for engine in engines:
            engine.stop()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, with engines that echo; afterwards nothing may be left open on them."""
    for engine in shared_cluster.engines:
        engine.reset()
    yield shared_cluster
    shared_cluster.hold(False)
    wait_until(lambda: not shared_cluster.open, "the engines to be empty")
