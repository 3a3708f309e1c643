"""What an attention node measures: where a step's time goes by layer, how full lanes, batches, queue and KV are."""

from moe_runtime.metrics import Counter, Metrics


class StepMetrics:
    """Handles bound once; see docs/architecture.md for the meaning of each name."""

    def __init__(self, metrics: Metrics, layers: int) -> None:
        def per_layer(part: str) -> list[Counter]:
            return [metrics.counter("layer_seconds_total", {"layer": str(i), "part": part}) for i in range(layers)]

        self.registry = metrics
        self.attention = per_layer("attention")
        self.experts = per_layer("experts")
        self.exchange = per_layer("exchange")
        self.head = metrics.counter("head_seconds_total")
        self.busy = metrics.counter("busy_seconds_total")
        # Time in which lanes were in flight and all of them waited for experts.
        self.bubble = metrics.counter("lane_bubble_seconds_total")
        self.bubble_share = metrics.gauge("lane_bubble_share")
        self.steps = metrics.counter("steps_total")
        self.step_tokens = metrics.counter("step_tokens_total")
        self.step_requests = metrics.counter("step_requests_total")
        self.batch_tokens = metrics.gauge("batch_tokens")
        self.generated = metrics.counter("sampled_tokens_total")
        self.preemptions = metrics.counter("preemptions_total")
        self.failed_steps = metrics.counter("failed_steps_total")
        self.running = metrics.gauge("requests_running")
        self.waiting = metrics.gauge("requests_waiting")
        self.kv_usage = metrics.gauge("kv_cache_usage_ratio")
        self.kv_blocks_held = metrics.gauge("kv_blocks_held")

    def refresh_bubble_share(self) -> None:
        total = self.busy.value + self.bubble.value
        self.bubble_share.set(self.bubble.value / total if total else 0.0)
