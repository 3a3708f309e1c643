"""Who has said what: the start-up protocol as pure state, without sockets or a clock of its own.

The controller hands every message to hear() and sends what it returns. control.py's docstring tells the order.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

import msgspec

from moe_runtime.cluster.topology import NodePlan
from moe_runtime.errors import ProtocolError
from moe_runtime.protocol.control import (
    PROTOCOL_VERSION,
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

Outgoing = tuple[str, FromController]


class Stage(IntEnum):
    """How far a node has come."""

    STARTING = 0
    LOADING = 1
    LISTENING = 2
    SERVING = 3


class Member:
    """What is known of one node; `heard_at` is the time of its last message, in seconds of the caller's clock."""

    def __init__(self, plan: NodePlan, now: float) -> None:
        self.plan = plan
        self.stage = Stage.STARTING
        self.heard_at = now
        self.fraction = 0.0
        self.what = "starting"
        self.samples: tuple[Sample, ...] = ()
        self.link_address: LinkAddress | None = None
        self.request_address: RequestAddress | None = None
        self.peers_sent = False


class Membership:
    """All planned nodes and their stages. `welcome` makes the answer to a node's Hello."""

    def __init__(self, nodes: Sequence[NodePlan], welcome: Callable[[NodePlan], Welcome], now: float) -> None:
        self.members = {node.name: Member(node, now) for node in nodes}
        self.url: str | None = None
        self.fatal: list[Fatal] = []
        self._welcome = welcome

    @property
    def ready(self) -> bool:
        """Every process has said Serving."""
        return not self.late()

    def late(self) -> list[Member]:
        """The nodes that have not said Serving."""
        return [member for member in self.members.values() if member.stage is not Stage.SERVING]

    def hear(self, sender: str, message: ToController, now: float) -> list[Outgoing]:
        """Take in one message and return the answers to send.

        Raises ProtocolError when the sender is unknown, speaks another version or says a thing out of turn.
        """
        member = self.members.get(sender)
        if member is None:
            raise ProtocolError(f"a process calls itself {sender!r}; this cluster has {', '.join(self.members)}")
        if not isinstance(message, Hello | Fatal) and member.stage is Stage.STARTING:
            raise ProtocolError(f"{sender} sent {type(message).__name__} before Hello")
        member.heard_at = now
        match message:
            case Hello():
                self._hello(member, message)
                return [(sender, self._welcome(member.plan)), *self._release()]
            case Progress():
                member.fraction, member.what = min(max(message.fraction, 0.0), 1.0), message.what
            case Listening():
                self._listening(member, message)
            case Serving():
                self._serving(member, message)
            case Heartbeat():
                member.samples = message.samples
            case Fatal():
                self.fatal.append(msgspec.structs.replace(message, node=sender))
        return self._release()

    def stats(self, now: float) -> ClusterStats:
        """Every node's last samples, and under `controller` how long ago each was heard."""
        ages = tuple(
            Sample("node_heartbeat_age_seconds", "gauge", now - member.heard_at, {"node": name})
            for name, member in self.members.items()
        )
        return ClusterStats({"controller": ages, **{name: member.samples for name, member in self.members.items()}})

    def _hello(self, member: Member, hello: Hello) -> None:
        plan = member.plan
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(f"{plan.name} speaks protocol {hello.version}, the controller {PROTOCOL_VERSION}")
        if hello.role != plan.role:
            raise ProtocolError(f"{plan.name} says that its role is {hello.role}, the plan says {plan.role}")
        if member.stage is not Stage.STARTING:
            raise ProtocolError(f"{plan.name} said Hello twice, now from process {hello.pid}")
        member.stage, member.what = Stage.LOADING, "loading"

    def _listening(self, member: Member, message: Listening) -> None:
        if member.plan.role != "ffn" or member.stage is not Stage.LOADING:
            raise ProtocolError(f"{member.plan.name} ({member.plan.role}, {member.stage.name}) said Listening")
        member.stage, member.what, member.link_address = Stage.LISTENING, "listening", message.address

    def _serving(self, member: Member, message: Serving) -> None:
        name, role = member.plan.name, member.plan.role
        expected = Stage.LISTENING if role == "ffn" else Stage.LOADING
        if member.stage is not expected:
            raise ProtocolError(f"{name} said Serving while {member.stage.name}, expected {expected.name}")
        if role != "ffn" and not member.peers_sent:
            raise ProtocolError(f"{name} said Serving before it was told its peers")
        if role == "attention" and message.request_address is None:
            raise ProtocolError(f"{name} said Serving without a request address")
        if role == "gateway" and message.url is None:
            raise ProtocolError(f"{name} said Serving without its URL")
        member.stage, member.fraction, member.what = Stage.SERVING, 1.0, "ready"
        member.request_address = message.request_address
        self.url = message.url if role == "gateway" else self.url

    def _release(self) -> list[Outgoing]:
        """Peers for the nodes whose peers have all become known since the last message."""
        outgoing: list[Outgoing] = []
        links = [m.link_address for m in self._of_role("ffn")]
        requests = [m.request_address for m in self._of_role("attention")]
        known_links = tuple(address for address in links if address)
        known_requests = tuple(address for address in requests if address)
        for member in self.members.values():
            if member.peers_sent or member.stage is not Stage.LOADING:
                continue
            if member.plan.role == "attention" and len(known_links) == len(links):
                outgoing.append((member.plan.name, Peers(ffn=known_links)))
            elif member.plan.role == "gateway" and len(known_requests) == len(requests):
                outgoing.append((member.plan.name, Peers(attention=known_requests)))
            else:
                continue
            member.peers_sent = True
        return outgoing

    def _of_role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.plan.role == role]
