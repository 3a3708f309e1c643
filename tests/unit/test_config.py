"""The configuration tree: what it refuses, and in which words."""

from pathlib import Path

import pytest

from moe_runtime.config import Config, load_config, parse_config
from moe_runtime.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_name_their_topology(path: Path) -> None:
    cluster = load_config(path).cluster
    expected = {"demo": (1, 2), "unsplit": (1, 0)}.get(path.stem) or (int(path.stem[0]), int(path.stem[2]))
    assert (cluster.attention_nodes, cluster.ffn_nodes) == expected


def test_a_written_configuration_and_overrides_meet(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m}\ncluster: {ffn_nodes: 2, heartbeat_s: 1}\n")
    config = load_config(path, ["cluster.ffn_nodes=3", "model.dtype=bfloat16", "scheduler.max_context=null"])
    assert config.cluster.ffn_nodes == 3
    assert config.cluster.heartbeat_s == 1.0
    assert config.model.dtype == "bfloat16"
    assert config.gateway == Config(model=config.model).gateway


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.ffn_node=1", "unknown key cluster.ffn_node; did you mean cluster.ffn_nodes?"),
        ("exchnge.lanes=1", "unknown key exchnge; did you mean exchange?"),
        ("model.zzzzzzzz=1", "known keys: path, dtype, quant, attention_quant, served_name"),
        ("exchange.lanes=5", "exchange.lanes is 5: expected `int` <= 4"),
        ("cluster.attention_nodes=0", "cluster.attention_nodes is 0: expected `int` >= 1"),
        ("cluster.ffn_nodes=two", "cluster.ffn_nodes is 'two': expected `int`"),
        ("cluster.heartbeat_s=.inf", "cluster.heartbeat_s is inf"),
        ("kv_cache.memory_fraction=.nan", "kv_cache.memory_fraction is nan"),
        ("exchange.transport=rdma", "expected one of auto, shm, gloo, nccl"),
        ("exchange.transport=nccl", "exchange.transport nccl needs cluster.device cuda"),
        ("model.aliases=[a, 5]", "model.aliases[1] is 5: expected `str`, got `int`"),
        ("model.aliases=a", "model.aliases is 'a': expected `array`"),
        ("model.aliases=['']", "model.aliases[0] is '': expected `str` of length >= 1"),
        ("model.served_name=''", "model.served_name is '': expected `str` of length >= 1"),
        ("gateway.api_key_file=5", "gateway.api_key_file is 5: expected `str | null`"),
        ("gateway.api_keys=[a]", "unknown key gateway.api_keys; did you mean gateway.api_key_file?"),
        ("gateway.max_open_requests=0", "gateway.max_open_requests is 0: expected `int` >= 1"),
        ("gateway.request_timeout_s=0", "gateway.request_timeout_s is 0: expected `float` > 0"),
        ("gateway.request_timeout_s=.inf", "gateway.request_timeout_s is inf: expected `float` <= 86400"),
        ("gateway.request_timeout_s=100000", "gateway.request_timeout_s is 100000: expected `float` <= 86400"),
        ("cluster=3", "cluster must be a section of keys, got 3"),
        ("cluster.ffn_nodes.more=3", "'ffn_nodes' is a value, not a section"),
        ("cluster.ffn_nodes", "expected section.key=value"),
        ("cluster.ffn_nodes=[", "not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path, "model: {path: m}\ncluster: {ffn_nodes: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert message in str(caught.value)


def test_names_may_hold_any_characters(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m, aliases: ['a b/c?d#e%2F', \"模型\", '*']}\n")
    assert load_config(path).model.aliases == ("a b/c?d#e%2F", "模型", "*")


@pytest.mark.parametrize(("text", "message"), [("- a\n", "a mapping of sections"), ("a: [\n", "not valid YAML")])
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_a_missing_file_and_a_missing_model() -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(Path("no-such-file.yaml"))
    with pytest.raises(ConfigError, match="missing required field `model`"):
        parse_config({})
