"""What the routes share: from a checked request with its prompts to an answer, whole or streamed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from moe_runtime.gateway.engine_client import EngineClient
from moe_runtime.gateway.errors import ApiError, invalid, shorten
from moe_runtime.gateway.generation import Choice, Generation
from moe_runtime.gateway.metrics import GatewayMetrics, RequestClock
from moe_runtime.gateway.prompts import PromptEncoder
from moe_runtime.gateway.responses import Body, ChatForm, CompletionForm, Form
from moe_runtime.gateway.sampling import Limits, sampling_params
from moe_runtime.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from moe_runtime.gateway.stream import EventStream, sse_events, while_connected
from moe_runtime.gateway.tokenizer import TextTokenizer
from moe_runtime.protocol.messages import Submit


@dataclass
class Service:
    """The gateway's parts, and whether it still takes requests.

    models: every name of the one model, the proper one first. stale_after_s: when silence means ill health.
    """

    models: tuple[str, ...]
    limits: Limits
    max_body_bytes: int
    max_open_requests: int
    request_timeout_s: float
    stale_after_s: float
    tokenizer: TextTokenizer
    encoder: PromptEncoder
    engine: EngineClient
    metrics: GatewayMetrics
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The model's proper name."""
        return self.models[0]

    def resolve_model(self, model: str | None) -> str:
        """The name that an answer shows: the one asked for. Raises ApiError 404 if nothing here has it."""
        if model is None:
            return self.model
        if model not in self.models:
            names = ", ".join(map(repr, self.models))
            message = f"the model {shorten(model)} does not exist; this server has {names}"
            raise ApiError(404, message, "model", "model_not_found")
        return model

    def admit(self, model: str | None, choices: int = 1) -> str:
        """resolve_model, and room for so many new texts. Raises ApiError 404, 429, and 503 while shutting down."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="unavailable")
        name = self.resolve_model(model)
        check_room(self.engine.open_requests, choices, self.max_open_requests)
        return name

    def ill(self) -> str | None:
        """What is wrong with the cluster, or None."""
        missing = [node for node, alive in self.engine.alive.items() if not alive]
        if missing:
            return f"no connection to {', '.join(missing)}"
        if self.metrics.nodes.age_s > self.stale_after_s:
            return f"no news of the nodes for {self.metrics.nodes.age_s:.1f} s"
        return None

    async def complete(self, request: Request, body: CompletionRequest, arrived: float) -> Response:
        """Answer /v1/completions. arrived: time.perf_counter() when the request came."""
        form = CompletionForm(self.admit(body.model, len(body.prompt) * body.n), body.include_usage)
        return await self._answer(request, body, form, await self.encoder.completion(body), arrived)

    async def chat(self, request: Request, body: ChatRequest, arrived: float) -> Response:
        """Answer /v1/chat/completions; see complete."""
        form = ChatForm(self.admit(body.model, body.n), body.include_usage)
        return await self._answer(request, body, form, [await self.encoder.chat(body)], arrived)

    async def _answer(
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
        self.admit(body.model, len(prompts))
        choices = []
        for index, prompt in enumerate(prompts):
            sampling = sampling_params(body, len(prompt), self.limits, form.prompt_field)
            submit = Submit(f"{form.id}-{index}", prompt, sampling)
            clock = RequestClock(self.metrics, arrived)
            choices.append(Choice(index, submit, self.tokenizer, body.stop, clock))
        return Generation(self.engine, choices)


def check_room(open_requests: int, choices: int, most: int) -> None:
    """Raises ApiError 429 if so many more texts are too many now, 400 if they always are."""
    if choices > most:
        raise invalid(f"{choices} choices are more than the {most} that this server works on at once", "n")
    if open_requests + choices > most:
        raise ApiError(429, f"{open_requests} texts are being generated, at most {most} can be", code="overloaded")


async def _whole(form: Form, generation: Generation, choices: int) -> Body:
    texts, reasons = list(repeat("", choices)), list(repeat("", choices))
    async for delta in generation.deltas():
        texts[delta.index] += delta.text
        reasons[delta.index] = delta.finish_reason or ""
    return form.whole(texts, reasons, generation.usage)
