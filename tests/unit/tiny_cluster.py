"""A whole cluster in one thread, pumped by hand: a tiny random model, engines and expert servers over in-process links.

Legend: V vocabulary, H hidden, E experts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_nodes.cache.block_pool import BlockPool
from attention_nodes.cache.kv_store import KvStore
from attention_nodes.decoding.masks import TokenMask
from attention_nodes.engine import Engine
from attention_nodes.forward.local_experts import LocalExperts
from attention_nodes.forward.model import AttentionModel
from attention_nodes.forward.remote_experts import RemoteExperts
from attention_nodes.scheduling.admission import Admission
from attention_nodes.scheduling.request import Request, replica_key
from attention_nodes.scheduling.scheduler import Answer, Scheduler
from attention_nodes.step_metrics import StepMetrics
from eplb import Placement, round_robin
from ffn_nodes.gather import GatherQueue
from ffn_nodes.server import ExpertServer
from moe_runtime.config import ExchangeConfig, SchedulerConfig
from moe_runtime.errors import ProtocolError
from moe_runtime.metrics import Metrics
from moe_runtime.models.expert_layers import ExpertLayer, load_expert_layers
from moe_runtime.models.reference import expert_mlp, reference_logits
from moe_runtime.models.spec import FfnSpec, LayerSpec, ModelSpec, RopeSpec
from moe_runtime.models.weights import AttentionLayerWeights, AttentionWeights, ExpertWeights
from moe_runtime.protocol.messages import RequestFailed, SamplingParams, TokenOutput
from moe_runtime.quant.formats import Format, plain_format
from moe_runtime.transport.base import Link
from moe_runtime.transport.handshake import LinkOptions
from moe_runtime.transport.inproc import link_pair

CPU = torch.device("cpu")
FINGERPRINT = 0xFEED
MAX_PAYLOAD = 1 << 20


def tiny_spec() -> ModelSpec:
    """A dense layer, a MoE layer with a gated shared expert, a MoE layer with a sliding window."""
    return ModelSpec(
        family="tiny",
        vocab=96,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        max_context=64,
        layers=(
            LayerSpec(FfnSpec(routed=0, top_k=0, intermediate=0, shared_intermediate=24)),
            LayerSpec(FfnSpec(routed=6, top_k=2, intermediate=16, shared_intermediate=8, shared_gate=True)),
            LayerSpec(FfnSpec(routed=6, top_k=3, intermediate=16), window=6),
        ),
        rope=RopeSpec((1.0, 0.3, 0.1, 0.03)),
        norm_eps=1e-5,
        attention_scale=8**-0.5,
    )


def tensor(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def attention_weights(spec: ModelSpec) -> AttentionWeights:
    """Random weights large enough that greedy text is varied and far from ties."""
    queries, rows = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    layers = tuple(
        AttentionLayerWeights(
            1 + tensor(10 * i + 1, spec.hidden, scale=0.1),
            tensor(10 * i + 2, rows, spec.hidden, scale=0.4),
            tensor(10 * i + 3, spec.hidden, queries, scale=0.4),
            1 + tensor(10 * i + 4, spec.hidden, scale=0.1),
            router_EH=tensor(10 * i + 5, layer.ffn.routed, spec.hidden) if layer.ffn.routed else None,
            shared_gate_1H=tensor(10 * i + 6, 1, spec.hidden) if layer.ffn.shared_gate else None,
        )
        for i, layer in enumerate(spec.layers)
    )
    embed, head = tensor(1001, spec.vocab, spec.hidden), tensor(1002, spec.vocab, spec.hidden)
    return AttentionWeights(embed, layers, torch.ones(spec.hidden), head)


@dataclass(frozen=True)
class TinyCheckpoint:
    """Random experts, the same wherever they are read."""

    spec: ModelSpec

    def expert_format(self, layer: int, expert: int, dtype: torch.dtype, quant: str | None) -> Format:
        return plain_format(dtype)

    def expert(self, layer: int, expert: int, form: Format | None = None) -> ExpertWeights:
        size, seed = self.spec.layers[layer].ffn.intermediate_of(expert), 5000 + 100 * layer + expert
        gate_up = tensor(seed, 2 * size, self.spec.hidden, scale=0.4)
        return ExpertWeights(gate_up, tensor(seed + 50, self.spec.hidden, size, scale=0.4))


def expert_layers(spec: ModelSpec, placement: Placement, node: int) -> tuple[ExpertLayer, ...]:
    return load_expert_layers(TinyCheckpoint(spec), spec, placement, node, torch.float32, CPU, lambda *_: None)


def weighted_sum(spec: ModelSpec, layer: int, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What all nodes together must answer, token by token and pick by pick."""
    checkpoint, y_TH = TinyCheckpoint(spec), torch.zeros_like(x_TH)
    for token, (experts, weights) in enumerate(zip(experts_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            y_TH[token] += weight * expert_mlp(x_TH[token : token + 1], checkpoint.expert(layer, expert))[0]
    return y_TH


def place(spec: ModelSpec, nodes: int, spare: float = 0.0) -> Placement:
    return round_robin(spec.experts, [f"ffn-{node}" for node in range(nodes)], spare, epoch=3)


def options(node: str, index: int) -> LinkOptions:
    return LinkOptions(node, index, FINGERPRINT, "float32", MAX_PAYLOAD, ExchangeConfig(lanes=4, reply_timeout_s=5.0))


def linked(attention: int, ffn: int) -> tuple[Link, Link]:
    """The attention node's and the FFN node's end of a new link."""
    return link_pair(options(f"attention-{attention}", attention), options(f"ffn-{ffn}", ffn))


@dataclass
class FfnNode:
    """An expert server and the links that it accepted."""

    server: ExpertServer
    links: list[Link] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def hear(self) -> None:
        for link in self.links:
            while (frame := link.receive()) is not None:
                try:
                    self.server.receive(link, frame)
                except ProtocolError as error:
                    self.refused.append(str(error))

    def work(self) -> bool:
        busy = len(self.server.queue) > 0
        assert self.server.serve() == []
        return busy

    def run(self) -> None:
        self.hear()
        while self.work():
            pass


def ffn_node(spec: ModelSpec, placement: Placement, node: int, epoch: int | None = None, wire: str = "same") -> FfnNode:
    epoch = placement.epoch if epoch is None else epoch
    queue = GatherQueue("laggard_first", 0)
    layers = expert_layers(spec, placement, node)
    return FfnNode(ExpertServer(spec, layers, torch.float32, epoch, FINGERPRINT, queue, wire))


@dataclass
class AttentionNode:
    """An engine, its links, and every answer it gave."""

    engine: Engine
    pool: BlockPool
    links: dict[int, Link]
    answers: list[tuple[bytes, Answer]]
    submitted: int = 0

    def submit(
        self,
        name: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        resumed: int = 0,
        mask: TokenMask | None = None,
    ) -> Request:
        """tokens: the prompt, and `resumed` tokens that were generated before."""
        prompt, key = len(tokens) - resumed, replica_key(name)
        request = Request(name, b"gateway", list(tokens), prompt, sampling, self.submitted, key, mask=mask)
        self.submitted += 1
        self.engine.submit(request)
        return request

    def hear(self) -> None:
        for node, link in self.links.items():
            while (frame := link.receive()) is not None:
                self.engine.accept(node, frame)

    def tokens_of(self, name: str) -> list[int]:
        return [token for output in self.outputs_of(name) for token in output.token_ids]

    def outputs_of(self, name: str) -> list[TokenOutput]:
        return [a for _, a in self.answers if isinstance(a, TokenOutput) and a.request_id == name]

    @property
    def failures(self) -> list[RequestFailed]:
        return [answer for _, answer in self.answers if isinstance(answer, RequestFailed)]


@dataclass(frozen=True)
class Sizes:
    """What the engine tests vary."""

    lanes: int = 1
    blocks: int = 64
    block_size: int = 4
    batch_tokens: int = 64
    batch_requests: int = 32


def attention_node(
    spec: ModelSpec, sizes: Sizes, experts: LocalExperts | RemoteExperts, links: dict[int, Link]
) -> AttentionNode:
    pool = BlockPool(sizes.blocks, sizes.block_size)
    config = SchedulerConfig(max_batch_tokens=sizes.batch_tokens, max_batch_requests=sizes.batch_requests)
    scheduler = Scheduler(config, pool, sizes.lanes, Admission(pool, spec.max_context, spec.vocab))
    kv = KvStore(spec, pool.total, pool.block_size, torch.float32, CPU)
    model = AttentionModel(spec, attention_weights(spec), kv)
    answers: list[tuple[bytes, Answer]] = []
    metrics = StepMetrics(Metrics(), len(spec.layers))
    engine = Engine(model, experts, scheduler, pool, sizes.lanes, metrics, answers.extend)
    return AttentionNode(engine, pool, links, answers)


def unsplit_node(spec: ModelSpec, sizes: Sizes) -> AttentionNode:
    placement = place(spec, 1)
    return attention_node(spec, sizes, LocalExperts(expert_layers(spec, placement, 0), placement, CPU), {})


@dataclass
class Cluster:
    """M attention nodes and N FFN nodes, all in this thread."""

    attention: list[AttentionNode]
    ffn: list[FfnNode]

    def step(self) -> None:
        """Everybody does what is due once."""
        for node in self.attention:
            node.engine.start_idle_lanes()
            node.engine.run_ready()
        for ffn in self.ffn:
            ffn.hear()
            ffn.work()
        for node in self.attention:
            node.hear()

    def shuffled_step(self, dice: random.Random) -> None:
        """One thing happens somewhere: the interleavings that real processes would have."""
        node, ffn = dice.choice(self.attention), dice.choice(self.ffn) if self.ffn else None
        things = [
            node.engine.start_idle_lanes,
            node.engine.run_ready,
            node.hear,
            *([ffn.hear, ffn.work] if ffn else []),
        ]
        dice.choice(things)()

    def drain(self, dice: random.Random | None = None, bound: int = 40_000) -> None:
        for _ in range(bound):
            if all(node.engine.drained for node in self.attention):
                return
            self.step() if dice is None else self.shuffled_step(dice)
        raise AssertionError("the cluster does not come to an end")


def split_cluster(spec: ModelSpec, sizes: Sizes, attention: int = 1, ffn: int = 2, spare: float = 0.0) -> Cluster:
    placement = place(spec, ffn, spare)
    servers = [ffn_node(spec, placement, node) for node in range(ffn)]
    nodes = []
    for index in range(attention):
        links = {}
        for node, server in enumerate(servers):
            links[node], far = linked(index, node)
            server.links.append(far)
        nodes.append(attention_node(spec, sizes, RemoteExperts(index, links, placement, FINGERPRINT), links))
    return Cluster(nodes, servers)


def reference_logprobs(spec: ModelSpec, tokens: Sequence[int]) -> Tensor:
    """The plain forward's log-probabilities after each token, float64 [T, V]."""
    logits_TV = reference_logits(torch.tensor(tokens), spec, attention_weights(spec), TinyCheckpoint(spec).expert)
    return logits_TV.double().log_softmax(-1)


def reference_text(spec: ModelSpec, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of the plain whole-sequence forward; each must win clearly, so that rounding cannot matter."""
    tokens, weights, checkpoint = list(prompt), attention_weights(spec), TinyCheckpoint(spec)
    for _ in range(count):
        logits_V = reference_logits(torch.tensor(tokens), spec, weights, checkpoint.expert)[-1]
        best, second = logits_V.topk(2).values.tolist()
        assert best - second > 1e-3, "a near tie: choose other prompts"
        tokens.append(int(logits_V.argmax()))
    return tokens[len(prompt) :]
