"""How cores are divided among nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.cluster.cores import deal_cores, parse_cpu_quota, plan_threads
from moe_runtime.cluster.topology import describe_plan, plan_nodes
from moe_runtime.config import Config, parse_config

counts = st.integers(1, 6)


def config(attention: int, ffn: int, lanes: int, attention_threads: int = 0, ffn_threads: int = 0) -> Config:
    cluster = {
        "attention_nodes": attention,
        "ffn_nodes": ffn,
        "attention_threads": attention_threads,
        "ffn_threads": ffn_threads,
    }
    return parse_config({"model": {"path": "m"}, "cluster": cluster, "exchange": {"lanes": lanes}})


@pytest.mark.parametrize(
    ("cores", "attention", "ffn", "lanes", "expected"),
    [
        (2, 1, 1, 1, (2, 2)),  # one lane: the roles take turns
        (2, 1, 2, 1, (2, 1)),
        (2, 1, 1, 2, (1, 1)),  # two lanes: both at once
        (2, 2, 3, 2, (1, 1)),  # more nodes than cores: one each
        (8, 1, 2, 2, (4, 2)),
        (8, 1, 3, 2, (5, 1)),  # what the FFN nodes cannot divide goes to attention
        (16, 2, 1, 4, (4, 8)),
        (8, 1, 0, 1, (8, 0)),
        (8, 3, 0, 2, (2, 0)),
    ],
)
def test_known_divisions(cores: int, attention: int, ffn: int, lanes: int, expected: tuple[int, int]) -> None:
    assert plan_threads(cores, config(attention, ffn, lanes)) == expected


def test_cores_are_dealt_once_each_and_run_out() -> None:
    assert deal_cores((0, 1, 4, 5), [2, 1]) == [(0, 1), (4,)]
    assert deal_cores((0, 1), [1, 1, 1]) == [(0,), (1,), ()]
    assert deal_cores((0, 1), [3]) == [()]
    assert deal_cores((), [1, 1]) == [(), ()]


@given(st.integers(1, 64), counts, counts, st.integers(1, 4))
def test_roles_that_run_at_once_share_the_cores(cores: int, attention: int, ffn: int, lanes: int) -> None:
    a, f = plan_threads(cores, config(attention, ffn, lanes))
    assert a >= 1
    assert f >= 1
    busy = [a * attention, f * ffn] if lanes == 1 else [a * attention + f * ffn]
    assert max(busy) <= max(cores, attention + ffn)


def test_configured_threads_are_kept() -> None:
    assert plan_threads(8, config(1, 2, 2, attention_threads=6)) == (6, 1)
    assert plan_threads(8, config(1, 2, 2, ffn_threads=3)) == (2, 3)
    assert plan_threads(8, config(1, 2, 1, 3, 5)) == (3, 5)
    assert plan_threads(8, config(2, 0, 1, attention_threads=3)) == (3, 0)


def test_the_plan_names_every_process() -> None:
    nodes = plan_nodes(config(2, 1, 2), 8)
    assert [(node.name, node.role, node.index, node.threads) for node in nodes] == [
        ("f0", "ffn", 0, 4),
        ("a0", "attention", 0, 2),
        ("a1", "attention", 1, 2),
        ("gateway0", "gateway", 0, 1),
    ]
    assert describe_plan(nodes, 8) == "plan: 2 attention x 2 threads, 1 ffn x 4 threads, 1 gateway on 8 cores"


def test_container_quotas() -> None:
    assert parse_cpu_quota("max 100000\n") is None
    assert parse_cpu_quota("150000 100000\n") == 2
    assert parse_cpu_quota("5000 100000\n") == 1
