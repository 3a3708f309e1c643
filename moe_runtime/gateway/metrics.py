"""Prometheus metrics: latencies as the client sees them, and every node's own samples with a `node` label."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moe_runtime.protocol.control import Sample

_PREFIX = "moe_runtime_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GatewayMetrics:
    """The gateway's own metrics in a registry of their own.

    own_samples: gives the gateway's samples for heartbeats and /metrics; node: the name they are labelled with.
    """

    def __init__(self, node: str, own_samples: Callable[[], Sequence[Sample]]) -> None:
        self.nodes = NodeSamples(node, own_samples)
        self.registry = CollectorRegistry()
        self.ttft = self._histogram("time_to_first_token_seconds", "From the request to its first text.")
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Per request: (end-to-end - time to first token) / (tokens - 1)."
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "From the request to its last text.")
        self.success = self._counter("request_success", "Requests answered whole, by finish reason.", "finished_reason")
        self.failure = self._counter("request_failure", "Requests that ended otherwise, by kind.", "kind")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self.generation_tokens = self._counter("generation_tokens", "New tokens of answered requests.")
        self._answers = self._counter(
            "http_responses", "HTTP requests by route and status; 499: the client left.", "route", "status"
        )
        self.registry.register(self.nodes)

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)

    def answered(self, route: str | None, status: int) -> None:
        """Count an HTTP request; its route is None where there was none."""
        self._answers.labels(route or "none", str(status)).inc()

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=_SECONDS, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        self.nodes.taken.add(name)
        return Counter(_PREFIX + name, text, labels, registry=self.registry)


class RequestClock:
    """Times one choice, from the HTTP request's arrival."""

    def __init__(self, metrics: GatewayMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._first_text: float | None = None

    def text(self) -> None:
        if self._first_text is None:
            self._first_text = time.perf_counter()
            self._metrics.ttft.observe(self._first_text - self._arrived)

    def finished(self, reason: str, prompt_tokens: int, tokens: int) -> None:
        now = time.perf_counter()
        self._metrics.e2e.observe(now - self._arrived)
        if self._first_text is not None and tokens > 1:
            self._metrics.itl.observe((now - self._first_text) / (tokens - 1))
        self._metrics.success.labels(reason).inc()
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.generation_tokens.inc(tokens)

    def failed(self, kind: str) -> None:
        self._metrics.failure.labels(kind).inc()


class NodeSamples(Collector):
    """What the nodes last reported. A sample named like one of the gateway's own metrics is shown as `node_<name>`."""

    def __init__(self, own_node: str, own_samples: Callable[[], Sequence[Sample]]) -> None:
        self.taken: set[str] = set()
        self._own_node = own_node
        self._own_samples = own_samples
        self._nodes: Mapping[str, Sequence[Sample]] = {}
        self._updated = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the controller's last report."""
        return time.monotonic() - self._updated

    def update(self, nodes: Mapping[str, Sequence[Sample]]) -> None:
        self._nodes = nodes
        self._updated = time.monotonic()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for node, samples in {**self._nodes, self._own_node: self._own_samples()}.items():
            for sample in samples:
                name = self._family_name(sample)
                family = families.setdefault(name, Metric(name, "Reported by each node.", sample.kind))
                suffix = "_total" if sample.kind == "counter" else ""
                family.add_sample(name + suffix, {"node": node, **sample.labels}, sample.value)
        yield from families.values()

    def _family_name(self, sample: Sample) -> str:
        name = sample.name.removesuffix("_total") if sample.kind == "counter" else sample.name
        return _PREFIX + ("node_" + name if name in self.taken else name)
