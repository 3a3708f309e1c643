"""The start-up protocol as pure state: who is told what, when, and what is out of turn."""

import pytest

from moe_runtime.cluster.membership import Membership
from moe_runtime.cluster.topology import NodePlan, plan_nodes
from moe_runtime.config import Config, parse_config
from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.control import (
    ClusterStats,
    Fatal,
    FromController,
    Heartbeat,
    Hello,
    LinkAddress,
    Listening,
    Peers,
    Progress,
    RequestAddress,
    Sample,
    Serving,
    ToController,
    Welcome,
)


def config(attention: int = 1, ffn: int = 2) -> Config:
    return parse_config({"model": {"path": "m"}, "cluster": {"attention_nodes": attention, "ffn_nodes": ffn}})


def welcome(node: NodePlan) -> Welcome:
    return Welcome(config(), "m", b"", 1, None, "127.0.0.1", 1, "run", node.threads, node.index)


def membership(attention: int = 1, ffn: int = 2) -> Membership:
    return Membership(plan_nodes(config(attention, ffn), 8), welcome, now=0.0)


def link(node: str) -> LinkAddress:
    return LinkAddress(node, "host", f"{node}.sock", "127.0.0.1", 1)


def request(node: str) -> RequestAddress:
    return RequestAddress(node, f"tcp://{node}", 1024, 512)


class Conversation:
    """Feeds messages and keeps the answers by node."""

    def __init__(self, members: Membership) -> None:
        self.members = members

    def say(self, node: str, message: ToController) -> list[tuple[str, FromController]]:
        return self.members.hear(node, message, now=1.0)

    def hello(self, *nodes: str) -> list[tuple[str, FromController]]:
        roles = {"a": "attention", "f": "ffn", "g": "gateway"}
        return [answer for node in nodes for answer in self.say(node, Hello(node, roles[node[0]], 1))]  # type: ignore[arg-type]


def test_a_cluster_comes_up_in_order() -> None:
    talk = Conversation(membership())
    answers = talk.hello("gateway0", "a0", "f1", "f0")
    assert [(node, type(message)) for node, message in answers] == [
        (node, Welcome) for node in ("gateway0", "a0", "f1", "f0")
    ]
    assert talk.say("f1", Listening(link("f1"))) == []
    assert talk.say("f0", Listening(link("f0"))) == [("a0", Peers(ffn=(link("f0"), link("f1"))))]
    assert talk.say("f0", Serving("f0")) == []
    assert talk.say("a0", Serving("a0", request("a0"))) == [("gateway0", Peers(attention=(request("a0"),)))]
    assert talk.say("gateway0", Serving("gateway0", url="http://here")) == []
    assert [member.plan.name for member in talk.members.late()] == ["f1"]
    talk.say("f1", Serving("f1"))
    assert talk.members.ready
    assert talk.members.url == "http://here"


def test_a_late_hello_gets_its_peers_right_after_the_welcome() -> None:
    talk = Conversation(membership(ffn=1))
    talk.hello("f0")
    talk.say("f0", Listening(link("f0")))
    assert [type(message) for _, message in talk.hello("a0")] == [Welcome, Peers]


def test_unsplit_attention_nodes_wait_for_nobody() -> None:
    talk = Conversation(membership(attention=2, ffn=0))
    assert talk.hello("a1")[1:] == [("a1", Peers())]


@pytest.mark.parametrize(
    ("node", "message", "fault"),
    [
        ("a9", Hello("a9", "attention", 1), "calls itself 'a9'; this cluster has f0, f1, a0, gateway0"),
        ("a0", Hello("a0", "attention", 1, version=99), "speaks protocol 99, the controller 1"),
        ("a0", Hello("a0", "ffn", 1), "its role is ffn, the plan says attention"),
        ("f0", Hello("f0", "ffn", 5), "said Hello twice, now from process 5"),
        ("a0", Heartbeat("a0"), "a0 sent Heartbeat before Hello"),
        ("f0", Serving("f0"), "said Serving while LOADING, expected LISTENING"),
        ("gateway0", Listening(link("gateway0")), r"gateway0 \(gateway, LOADING\) said Listening"),
        ("gateway0", Serving("gateway0", url="http://x"), "said Serving before it was told its peers"),
    ],
)
def test_words_out_of_turn_are_refused(node: str, message: ToController, fault: str) -> None:
    talk = Conversation(membership())
    talk.hello("f0", "gateway0")
    with pytest.raises(ProtocolError, match=fault):
        talk.say(node, message)


def test_progress_heartbeats_and_failures_are_kept() -> None:
    talk = Conversation(membership())
    talk.hello("f0", "a0")
    talk.say("f0", Progress("f0", 1.5, "layer 3 of 30"))
    assert (talk.members.members["f0"].fraction, talk.members.members["f0"].what) == (1.0, "layer 3 of 30")
    sample = Sample("steps_total", "counter", 3.0)
    talk.say("a0", Heartbeat("a0", (sample,)))
    stats = talk.members.stats(now=4.0)
    assert isinstance(stats, ClusterStats)
    assert stats.nodes["a0"] == (sample,)
    ages = {s.labels["node"]: s.value for s in stats.nodes["controller"]}
    assert ages == {"f0": 3.0, "f1": 4.0, "a0": 3.0, "gateway0": 4.0}
    talk.say("f0", Fatal("someone else", "no memory"))
    assert talk.members.fatal == [Fatal("f0", "no memory")]
