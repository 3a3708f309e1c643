"""`moe-runtime launch`: one cluster from a configuration, from start to end, with nothing left behind."""

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from eplb import round_robin
from moe_runtime.api_keys import read_keys
from moe_runtime.cluster.ask import AnswerPrinter
from moe_runtime.cluster.controller import Controller
from moe_runtime.cluster.cores import available_cores, core_ids
from moe_runtime.cluster.display import say
from moe_runtime.cluster.greeting import greeting
from moe_runtime.cluster.membership import Membership
from moe_runtime.cluster.model import ResolvedModel, resolve
from moe_runtime.cluster.running import ClusterError, RunningCluster, StopRequested
from moe_runtime.cluster.stop_signals import StopSignals
from moe_runtime.cluster.store import RendezvousStore
from moe_runtime.cluster.supervisor import NODE_COMMANDS, Supervisor
from moe_runtime.cluster.topology import NodePlan, describe_plan, plan_nodes
from moe_runtime.config import Config, GatewayConfig
from moe_runtime.errors import ConfigError, ProtocolError
from moe_runtime.protocol.control import PlacementMessage, Role, Welcome
from moe_runtime.protocol.placement_codec import placement_to_message


@dataclass(frozen=True)
class LaunchOptions:
    """What to do with the cluster once it is up, and where logs go (None: a directory removed at the end).

    ask: answer this on stdout, then stop. greet: answer this, say how to reach the server, and go on serving.
    """

    ask: str | None = None
    greet: str | None = None
    log_dir: Path | None = None
    commands: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)


def launch(config: Config, options: LaunchOptions) -> int:
    """Serve until a signal, or answer options.ask; returns the exit code: 0, 1 (a node failed), 128 + signal.

    Raises ConfigError or CheckpointError before any process is started.
    """
    check_address_free(config.gateway)
    return run_cluster(config, resolve(config), options)


def check_address_free(gateway: GatewayConfig) -> None:
    """Raises ConfigError when the gateway could not listen; the moment until it does is short, not none."""
    family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((gateway.host, gateway.port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"gateway: cannot listen on {gateway.host}:{gateway.port} ({error.strerror}); "
                "choose another port with --port, or --port 0 for a free one"
            ) from error


def run_cluster(config: Config, model: ResolvedModel, options: LaunchOptions) -> int:
    """launch() for a model that is already resolved."""
    console = Console(stderr=True)
    cores = available_cores()
    nodes = plan_nodes(config, cores, core_ids())
    for line in (model.describe(), describe_plan(nodes, cores)):
        say(console, line)
    try:
        with _cluster(config, model, nodes, options) as (cluster, signals):
            return _serve(cluster, signals, config, options, console)
    except (ClusterError, ProtocolError) as error:
        say(console, f"error: {error}")
        return 1


def _serve(
    cluster: RunningCluster, signals: StopSignals, config: Config, options: LaunchOptions, console: Console
) -> int:
    try:
        url = cluster.start(console)
        print(f"ready: {url}", flush=True)
        faults = [] if (failure := _work(cluster, url, config, options)) is None else [failure]
    except StopRequested:
        if not cluster.membership.ready:
            cluster.terminate()
            return signals.exit_code
        faults = []
    except ClusterError:
        cluster.terminate()
        raise
    faults += cluster.stop()
    for fault in faults:
        say(console, f"error: {fault}")
    return 1 if faults else 0


def _work(cluster: RunningCluster, url: str, config: Config, options: LaunchOptions) -> str | None:
    """Answer, or serve until a signal raises StopRequested; returns what went wrong with an answer."""
    question = options.ask or options.greet
    if question:
        keys = read_keys(config.gateway.api_key_file, os.environ)
        printer = AnswerPrinter(url, question, config.exchange.reply_timeout_s, next(iter(keys), None))
        printer.start()
        cluster.watch(lambda: not printer.is_alive())
        if printer.error or options.ask:
            return printer.error
        print(greeting(url, printer.model, bool(keys)), flush=True)
    cluster.watch(lambda: False)
    return None


@contextlib.contextmanager
def _cluster(
    config: Config, model: ResolvedModel, nodes: tuple[NodePlan, ...], options: LaunchOptions
) -> Iterator[tuple[RunningCluster, StopSignals]]:
    """Everything a launch holds, given back in reverse order whatever happens; killed processes come first."""
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        run_dir = stack.enter_context(_run_directory())
        store = RendezvousStore(config.cluster.host, config.cluster.startup_timeout_s)
        controller = stack.enter_context(Controller(config.cluster.host, config.cluster.heartbeat_s))
        log_dir = options.log_dir or run_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        commands = {**NODE_COMMANDS, **options.commands}
        supervisor = stack.enter_context(Supervisor(commands, controller.endpoint, log_dir))
        welcome = _welcomer(config, model, nodes, store, run_dir)
        membership = Membership(nodes, welcome, time.monotonic())
        yield RunningCluster(config, membership, controller, supervisor, signals), signals


@contextlib.contextmanager
def _run_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="moe-runtime-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _welcomer(
    config: Config, model: ResolvedModel, nodes: tuple[NodePlan, ...], store: RendezvousStore, run_dir: Path
) -> Callable[[NodePlan], Welcome]:
    spec = msgspec.msgpack.encode(model.spec)
    placement = _placement(config, model, nodes)

    def welcome(node: NodePlan) -> Welcome:
        return Welcome(
            config=config,
            model_dir=str(model.directory),
            spec=spec,
            fingerprint=model.fingerprint,
            placement=placement,
            store_host=store.host,
            store_port=store.port,
            run_dir=str(run_dir),
            threads=node.threads,
            cores=node.cores,
            index=node.index,
        )

    return welcome


def _placement(config: Config, model: ResolvedModel, nodes: tuple[NodePlan, ...]) -> PlacementMessage | None:
    ffn = [node.name for node in nodes if node.role == "ffn"]
    if not ffn:
        return None
    return placement_to_message(round_robin(model.spec.experts, ffn, config.eplb.spare_slots))
