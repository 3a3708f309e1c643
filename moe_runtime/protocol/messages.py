"""Messages between the gateway and an attention node: requests one way, tokens the other (ZeroMQ, msgspec).

The attention node binds a ROUTER socket; each gateway connects a DEALER and sends one encoded message per frame.
"""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """How to choose tokens; the gateway has checked every range. attention_nodes/decoding/sampler.py states the order.

    max_tokens 0: compute the prompt only. temperature 0 is greedy; top_k 0 means all. seed keys the counter-based
    draws. stop_token_ids end the text (the end-of-text ids are among them) and cannot be drawn before min_tokens.
    repetition_penalty counts prompt and output, the other two the output only. logit_bias: (token id, added value).
    bad_words: token sequences of which the last token cannot be drawn after the others. logprobs: None for no scores,
    else how many of the best tokens to report with each; prompt_logprobs likewise, for the prompt's tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new request. `resumed` counts tokens at the prompt's end that the request itself generated before."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    resumed: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client left, or the gateway has all it wants (a stop string): free everything, answer nothing more."""

    request_id: str


class TokenScore(msgspec.Struct, frozen=True, array_like=True):
    """How probable the model itself held a token: the logits' log-softmax before any parameter changes them.

    rank is 1 for the best token; top lists (token id, log-probability), best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(msgspec.Struct, frozen=True):
    """New tokens of one request; finish_reason is `stop` or `length` in its last output.

    scores: one per token where logprobs were asked for. prompt_scores: the next tokens of the prompt, in order and once
    each, all of them before the first token or the end; the prompt's first token has none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All tokens of one step, in one message."""

    outputs: tuple[TokenOutput, ...]


class RequestFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A request that ends without more tokens.

    kind: `invalid` (the client's fault), `overloaded` (too much at once), `unavailable` (nobody to do it), `internal`.
    """

    request_id: str
    kind: str
    message: str


ToAttention = Submit | Abort
FromAttention = StepOutputs | RequestFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_attention = msgspec.msgpack.Decoder(ToAttention).decode
decode_from_attention = msgspec.msgpack.Decoder(FromAttention).decode
