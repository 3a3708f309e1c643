"""One request's life on an attention node: its tokens, how far its KV cache has come, and what it holds."""

import hashlib
from dataclasses import dataclass, field

from attention_nodes.decoding.masks import TokenMask
from attention_nodes.decoding.state import DecodingState
from moe_runtime.protocol.messages import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` is the prompt and all that was generated; `computed` of them have keys and values in `blocks`.

    There is no prefill or decode state: a step processes tokens[computed : computed + k], and samples when that reaches
    the end. A preempted request simply has computed == 0 again.
    """

    request_id: str
    client: bytes
    tokens: list[int]
    generated_from: int  # index in tokens of the first generated one
    sampling: SamplingParams
    order: int  # arrival; lower is served first
    replica_key: int  # keys the choice among an expert's replicas: the same for the request wherever it runs
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    in_flight: bool = False
    aborted: bool = False
    preemptions: int = 0
    mask: TokenMask | None = None
    prompt_scored: int = 1  # prompt tokens whose scores were sent; the first one has none
    _decoding: DecodingState | None = None

    @property
    def remaining(self) -> int:
        """Tokens that a step has still to process before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.generated_from

    @property
    def most_tokens(self) -> int:
        """Tokens whose KV the request may need at its end: the last generated token is never fed back."""
        return self.generated_from + max(self.sampling.max_tokens - 1, 0)

    def append(self, token: int) -> None:
        """The text grows by one generated token."""
        self.tokens.append(token)
        if self.mask is not None:
            self.mask.accept(token)

    def unscored(self, start: int, stop: int) -> range:
        """Those of tokens[start:stop] that are prompt tokens with scores still to be sent.

        With the first generated token all of them were: a resumed request owes none either.
        """
        if self.sampling.prompt_logprobs is None or self.generated:
            return range(0)
        return range(max(start, self.prompt_scored), min(stop, self.generated_from))

    def decoding_state(self, vocab: int) -> DecodingState:
        """The sampling parameters, prepared on first use."""
        if self._decoding is None:
            self._decoding = DecodingState.of(self.sampling, self.tokens, self.generated_from, vocab)
        return self._decoding

    def finish_reason(self) -> str | None:
        """Why the text ends here, or None."""
        if self.generated and self.tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.generated >= self.sampling.max_tokens else None


def replica_key(request_id: str) -> int:
    """A stable 31-bit number from the request's id."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=4).digest(), "little") >> 1
