"""Messages between the gateway and an attention node: requests one way, tokens the other (ZeroMQ, msgspec).

The attention node binds a ROUTER socket; each gateway connects a DEALER and sends one encoded message per frame.
"""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """How to choose tokens; the gateway has checked every range. temperature 0 is greedy; top_k 0 means all.

    seed keys the counter-based draws. stop_token_ids end the text (the end-of-text ids are among them).
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new request. `resumed` counts tokens at the prompt's end that the request itself generated before."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    resumed: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client left, or the gateway has all it wants (a stop string): free everything, answer nothing more."""

    request_id: str


class TokenOutput(msgspec.Struct, frozen=True):
    """New tokens of one request; finish_reason is `stop` or `length` in its last output."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All tokens of one step, in one message."""

    outputs: tuple[TokenOutput, ...]


class RequestFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A request that ends without more tokens. kind: `invalid` (the client's fault), `overloaded`, `internal`."""

    request_id: str
    kind: str
    message: str


ToAttention = Submit | Abort
FromAttention = StepOutputs | RequestFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_attention = msgspec.msgpack.Decoder(ToAttention).decode
decode_from_attention = msgspec.msgpack.Decoder(FromAttention).decode
