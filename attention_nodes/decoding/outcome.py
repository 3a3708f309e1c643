"""What a step comes to, request by request."""

from dataclasses import dataclass

from moe_runtime.protocol.messages import TokenScore


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token, with its score if the request asked for one."""

    token: int
    score: TokenScore | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one request cannot go on; kind as in RequestFailed. Its neighbours are not touched by it."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one slice: the scores of prompt tokens that it owes, a choice if it samples; or a fault and nothing else."""

    prompt_scores: tuple[TokenScore, ...] = ()
    choice: Choice | None = None
    fault: Fault | None = None


NOTHING = Outcome()
NOT_FINITE = Fault("internal", "the model's logits for this request are not finite")
NONE_LEFT = Fault(
    "invalid",
    "no token is left to choose from: allowed_token_ids, bad_words and stop tokens before min_tokens exclude them all",
)
