"""What the routes share: from a checked request with its prompts to an answer, whole or streamed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from moe_runtime.gateway.engine_client import EngineClient
from moe_runtime.gateway.errors import ApiError, shorten
from moe_runtime.gateway.generation import Choice, Generation
from moe_runtime.gateway.metrics import GatewayMetrics, RequestClock
from moe_runtime.gateway.prompts import PromptEncoder
from moe_runtime.gateway.responses import Body, Form
from moe_runtime.gateway.sampling import Limits, sampling_params
from moe_runtime.gateway.schema import GenerationRequest
from moe_runtime.gateway.stream import EventStream, sse_events, while_connected
from moe_runtime.gateway.tokenizer import TextTokenizer
from moe_runtime.protocol.messages import Submit


@dataclass
class Service:
    """The gateway's parts, and whether it still takes requests. stale_after_s: when silence means ill health."""

    model: str
    limits: Limits
    max_body_bytes: int
    stale_after_s: float
    tokenizer: TextTokenizer
    encoder: PromptEncoder
    engine: EngineClient
    metrics: GatewayMetrics
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def admit(self, model: str | None) -> None:
        """Raises ApiError 503 while shutting down, and 404 for a model that is not served here."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="unavailable")
        if model is not None and model != self.model:
            message = f"the model {shorten(model)} does not exist; this server has {self.model!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def ill(self) -> str | None:
        """What is wrong with the cluster, or None."""
        missing = [node for node, alive in self.engine.alive.items() if not alive]
        if missing:
            return f"no connection to {', '.join(missing)}"
        if self.metrics.nodes.age_s > self.stale_after_s:
            return f"no news of the nodes for {self.metrics.nodes.age_s:.1f} s"
        return None

    async def answer(
        self, request: Request, body: GenerationRequest, form: Form, prompts: Sequence[tuple[int, ...]], arrived: float
    ) -> Response:
        """Generate for every prompt. A stream begins only once there is text, so that refusals have their status."""
        generation = self._generation(body, form, prompts, arrived)
        if not body.stream:
            whole = await while_connected(request.receive, _whole(form, generation, len(prompts)))
            return JSONResponse(whole)
        deltas = generation.deltas()
        first = await while_connected(request.receive, anext(deltas))
        events = sse_events(form, generation, first, deltas, len(prompts), body.include_usage)
        return EventStream(events, deltas)

    def _generation(
        self, body: GenerationRequest, form: Form, prompts: Sequence[tuple[int, ...]], arrived: float
    ) -> Generation:
        self.admit(body.model)
        choices = []
        for index, prompt in enumerate(prompts):
            sampling = sampling_params(body, len(prompt), self.limits, form.prompt_field)
            submit = Submit(f"{form.id}-{index}", prompt, sampling)
            clock = RequestClock(self.metrics, arrived)
            choices.append(Choice(index, submit, self.tokenizer, body.stop, clock))
        return Generation(self.engine, choices)


async def _whole(form: Form, generation: Generation, choices: int) -> Body:
    texts, reasons = list(repeat("", choices)), list(repeat("", choices))
    async for delta in generation.deltas():
        texts[delta.index] += delta.text
        reasons[delta.index] = delta.finish_reason or ""
    return form.whole(texts, reasons, generation.usage)
