"""From a checked request with its prompts to the choices that will answer it."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.gateway.choice import Choice, TextRules
from moe_runtime.gateway.echo import Echo, echo_of
from moe_runtime.gateway.metrics import GatewayMetrics, RequestClock
from moe_runtime.gateway.offload import offload
from moe_runtime.gateway.responses import Form
from moe_runtime.gateway.sampling import Limits, choice_params, fit_prompt, sampling_params, spell_bad_words
from moe_runtime.gateway.schema import CompletionRequest, GenerationRequest
from moe_runtime.gateway.tokenizer import TextTokenizer
from moe_runtime.protocol.messages import Submit


@dataclass(frozen=True)
class Planner:
    """What it takes to turn a request into choices."""

    tokenizer: TextTokenizer
    limits: Limits
    metrics: GatewayMetrics

    async def plan(
        self, body: GenerationRequest, form: Form, prompts: Sequence[tuple[int, ...]], arrived: float
    ) -> list[Choice]:
        """n choices per prompt: choice i of prompt p has the index p * n + i. Raises ApiError 400 naming a field."""
        words = body.bad_words
        bad_words = await offload(sum(map(len, words)), lambda: spell_bad_words(words, self.tokenizer))
        choices: list[Choice] = []
        for number, whole_prompt in enumerate(prompts):
            prompt = fit_prompt(body, whole_prompt, self.limits)
            shared = sampling_params(body, len(prompt), bad_words, self.limits, form.prompt_field)
            echo = await self._echo(body, number, prompt, len(prompt) < len(whole_prompt))
            for i in range(body.n):
                index = number * body.n + i
                submit = Submit(f"{form.id}-{index}", prompt, choice_params(shared, body, i))
                detokenizer = self.tokenizer.detokenizer(prompt, body.skip_special_tokens)
                clock = RequestClock(self.metrics, arrived)
                prompt_tokens = 0 if i else len(prompt)
                choices.append(Choice(index, submit, detokenizer, _rules(body), clock, prompt_tokens, echo))
        return choices

    async def _echo(
        self, body: GenerationRequest, number: int, prompt: tuple[int, ...], truncated: bool
    ) -> Echo | None:
        if not body.echoed:
            return None
        assert isinstance(body, CompletionRequest)
        source = body.prompt[number]
        given = source if isinstance(source, str) and not truncated else None
        return await offload(len(prompt), lambda: echo_of(self.tokenizer, prompt, given, body.skip_special_tokens))


def _rules(body: GenerationRequest) -> TextRules:
    return TextRules(
        stops=body.stop,
        stop_token_ids=body.stop_token_ids,
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        scored=body.scored is not None,
    )
