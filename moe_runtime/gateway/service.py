"""What the routes share: from a checked request with its prompts to an answer, whole or streamed."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from fastapi import Request, Response

from moe_runtime.gateway.engine_client import EngineClient
from moe_runtime.gateway.errors import ApiError, shorten
from moe_runtime.gateway.generation import Deadline, Generation, check_room
from moe_runtime.gateway.metrics import GatewayMetrics
from moe_runtime.gateway.offload import offload
from moe_runtime.gateway.plan import Planner
from moe_runtime.gateway.prompts import PromptEncoder
from moe_runtime.gateway.responses import Answer, ChatForm, CompletionForm, Form
from moe_runtime.gateway.sampling import Limits, check_vocabulary
from moe_runtime.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from moe_runtime.gateway.stream import EventStream, sse_events, while_connected
from moe_runtime.gateway.tokenizer import TextTokenizer


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
        name = self.admit(body.model, len(body.prompt) * body.n)
        check_vocabulary(body, self.limits.vocab)
        prompts = await self.encoder.completion(body)
        return await self._answer(
            request, body, CompletionForm(name, body, self.tokenizer.token_bytes), prompts, arrived
        )

    async def chat(self, request: Request, body: ChatRequest, arrived: float) -> Response:
        """Answer /v1/chat/completions; see complete."""
        name = self.admit(body.model, body.n)
        check_vocabulary(body, self.limits.vocab)
        prompts = [await self.encoder.chat(body)]
        return await self._answer(request, body, ChatForm(name, body, self.tokenizer.token_bytes), prompts, arrived)

    async def _answer(
        self, request: Request, body: GenerationRequest, form: Form, prompts: Sequence[tuple[int, ...]], arrived: float
    ) -> Response:
        """Generate for every prompt. A stream begins only once there is text, so that refusals have their status."""
        choices = await Planner(self.tokenizer, self.limits, self.metrics).plan(body, form, prompts, arrived)
        self.admit(body.model, len(choices))
        deadline = self._deadline(body.timeout, arrived)
        generation = Generation(self.engine, choices, deadline, self.max_open_requests)
        if not body.stream:
            whole = await while_connected(request.receive, _whole(form, generation, body.n))
            return Response(whole, media_type="application/json")
        deltas = generation.deltas()
        first = await while_connected(request.receive, anext(deltas))
        return EventStream(sse_events(form, generation, first, deltas, body), deltas, deadline)

    def _deadline(self, timeout_s: float | None, arrived: float) -> Deadline:
        limit_s = self.request_timeout_s if timeout_s is None else min(timeout_s, self.request_timeout_s)
        spent_s = time.perf_counter() - arrived
        return Deadline(asyncio.get_running_loop().time() + limit_s - spent_s, limit_s)


async def _whole(form: Form, generation: Generation, n: int) -> bytes:
    """The answer as JSON. The first choice of a prompt has the scores of the prompt for all of its choices."""
    prompts = [generation.choices[index - index % n] for index in range(len(generation.choices))]
    answers = [Answer(choice.submit.prompt_ids, choice.prompt_scores) for choice in prompts]
    async for delta in generation.deltas():
        answers[delta.index].add(delta)
    scores = sum(len(answer.scored) + len(answer.prompt_scores) for answer in answers)
    return await offload(scores, lambda: msgspec.json.encode(form.whole(answers, generation.usage)))
