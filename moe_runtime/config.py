"""One frozen, typed configuration tree for the whole cluster: read from YAML once, then sent to every node.

Unknown keys are refused with the nearest right one; values are checked against the types and ranges written here, so
each default has exactly one home.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml

from moe_runtime.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
# No wait is endless: a day at most, which also keeps infinity out.
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which checkpoint to serve: a local directory or a hub id; `dtype` is what weights and activations compute in.

    quant: the experts' format (see moe_runtime/quant/formats.py), attention_quant: that of attention's projections and
    the LM head; plain weights are quantized while they load. null takes each as the checkpoint has it. Clients know the
    model as served_name (the path, when null) and by each of `aliases`.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    quant: str | None = None
    attention_quant: str | None = None
    served_name: Name | None = None
    aliases: tuple[Name, ...] = ()


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many nodes of each role; ffn_nodes 0 is the unsplit mode: experts run inside each attention node.

    attention_threads and ffn_threads are compute threads per node; 0 divides the machine's cores.
    """

    attention_nodes: Positive = 1
    ffn_nodes: NonNegative = 1
    device: Literal["cpu", "cuda"] = "cpu"
    attention_threads: NonNegative = 0
    ffn_threads: NonNegative = 0
    host: str = "127.0.0.1"
    startup_timeout_s: Seconds = 600.0
    heartbeat_s: Seconds = 0.5
    drain_timeout_s: Seconds = 30.0


class ExchangeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How attention and FFN nodes talk: transport per link (`auto` takes shm on one host), lanes, gather policy.

    wire: what hidden states travel as: `same` as the model's dtype, or 8 bits a number with a scale per token.
    bucket_slack: on CUDA, how many times the tokens that are expected at an FFN node a message has room for.
    """

    transport: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    lanes: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    gather: Literal["laggard_first", "oldest_first", "window", "lockstep"] = "laggard_first"
    gather_window_us: NonNegative = 200
    wire: Literal["same", "int8", "fp8"] = "same"
    bucket_slack: Annotated[float, msgspec.Meta(ge=1, le=16)] = 1.25
    rendezvous_timeout_s: Seconds = 60.0
    reply_timeout_s: Seconds = 120.0
    close_timeout_s: Seconds = 5.0


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one lane's step, and of the waiting queue; max_context null means the model's."""

    max_batch_tokens: Positive = 512
    max_batch_requests: Positive = 64
    max_waiting: Positive = 1024
    max_context: Positive | None = None


class KvCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paged KV cache: `blocks` fixes the pool, else memory_fraction of what loading leaves free."""

    block_size: Positive = 16
    memory_fraction: Annotated[float, msgspec.Meta(gt=0, le=0.95)] = 0.2
    blocks: Positive | None = None


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP side; port 0 takes a free one.

    api_key_file: one key a line; with it, or with keys in the environment's MOE_RUNTIME_API_KEYS (comma-separated),
    only clients that show a key are answered. request_timeout_s bounds every request, whatever time it asks for itself.
    max_open_requests: texts being generated or waiting; more are answered with 429.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    max_body_bytes: Positive = 4 * 1024 * 1024
    max_tokens_default: Positive = 256
    max_open_requests: Positive = 4096
    request_timeout_s: Seconds = 3600.0
    api_key_file: str | None = None


class EplbConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expert placement at start: `spare_slots` is the fraction of extra physical slots, dealt as replicas in turn."""

    spare_slots: Annotated[float, msgspec.Meta(ge=0, le=8)] = 0.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole tree; see configs/ for written examples."""

    model: ModelConfig
    cluster: ClusterConfig = ClusterConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_cache: KvCacheConfig = KvCacheConfig()
    gateway: GatewayConfig = GatewayConfig()
    eplb: EplbConfig = EplbConfig()


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `a.b=c` overrides (values are YAML too). Raises ConfigError naming the place."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections ({', '.join(_fields(Config))})")
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Check a plain mapping against the tree's types and ranges. Raises ConfigError naming key, value and fault."""
    _refuse_unknown(tree, Config, "")
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), tree)) from error
    if config.exchange.transport == "nccl" and config.cluster.device != "cuda":
        raise ConfigError(f"exchange.transport nccl needs cluster.device cuda, which is {config.cluster.device}")
    return config


def _explain(message: str, tree: Mapping[str, Any]) -> str:
    """msgspec's `FAULT - at `$.a.b`` as `a.b is VALUE: FAULT`."""
    fault, _, path = message.partition(" - at `$.")
    place = path.rstrip("`")
    value: Any = tree
    kind: Any = Config
    for key in place.split(".") if place else ():
        name, _, index = key.rstrip("]").partition("[")
        value, kind = value[name], _fields(kind)[name]
        if index:
            value = value[int(index)]
    if isinstance(value, Mapping):
        return f"{place or 'configuration'}: {fault[0].lower()}{fault[1:]}"
    if get_origin(kind) is Literal:
        fault = f"expected one of {', '.join(get_args(kind))}"
    return f"{place} is {value!r}: {fault[0].lower()}{fault[1:]}"


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r}: expected section.key=value, for example cluster.ffn_nodes=2")
    *parents, last = key.strip().split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
        node = child
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML") from error


def _refuse_unknown(tree: object, struct: type[msgspec.Struct], place: str) -> None:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{place.rstrip('.') or 'the configuration'} must be a section of keys, got {tree!r}")
    fields = _fields(struct)
    for key, value in tree.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.4)
            hint = f"did you mean {place}{near[0]}?" if near else f"known keys: {', '.join(fields)}"
            raise ConfigError(f"unknown key {place}{key}; {hint}")
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            _refuse_unknown(value, kind, f"{place}{key}.")


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(struct)}
