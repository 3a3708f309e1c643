"""A gateway of a test's own, for what the shared one cannot be: configured otherwise, or about to end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fake_controller import FakeController, GatewayProcess, make_config, make_spec, wait_until
from fake_engine import FakeEngine
from tiny_tokenizer import EOS, VOCAB

from moe_runtime.config import Config
from moe_runtime.protocol.control import Fatal


@contextmanager
def gateway(
    model_dir: Path, config: Config | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[GatewayProcess, FakeEngine]]:
    """The process beside one fake attention node; it need not come up."""
    engine = FakeEngine("a0")
    spec = make_spec(VOCAB, (EOS,))
    controller = FakeController(config or make_config(), model_dir, spec, (engine.start(),))
    process = GatewayProcess(controller, environment)
    try:
        yield process, engine
    finally:
        process.close()
        controller.close()
        engine.stop()


def fatal_message(process: GatewayProcess) -> str:
    """Why the start failed."""
    assert process.wait_exit() == 1
    wait_until(lambda: bool(process.controller.of(Fatal)), "Fatal")
    (fatal,) = process.controller.of(Fatal)
    assert isinstance(fatal, Fatal) and fatal.node == "gateway0"
    return fatal.message
