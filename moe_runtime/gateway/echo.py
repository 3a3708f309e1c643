"""The prompt's text in front of a completion."""

from collections.abc import Sequence

import msgspec

from moe_runtime.gateway.scores import ScoredToken
from moe_runtime.gateway.tokenizer import TextTokenizer
from moe_runtime.protocol.messages import TokenScore


class Echo(msgspec.Struct, frozen=True):
    """A prompt's text, and per token how many of its characters come before."""

    ids: tuple[int, ...]
    text: str
    offsets: tuple[int, ...]

    def scored(self, scores: Sequence[TokenScore]) -> tuple[ScoredToken, ...]:
        """All of the prompt's tokens. scores: of all but the first, for which a model has none."""
        return tuple(ScoredToken(*entry) for entry in zip(self.ids, self.offsets, (None, *scores), strict=True))


def echo_of(tokenizer: TextTokenizer, ids: tuple[int, ...], given: str | None, skip_special: bool) -> Echo:
    """given: the text that the ids were made of, echoed as it is; without it the ids are decoded.

    Where a tokenizer normalizes what it is given, the offsets are those of its own text.
    """
    detokenizer = tokenizer.detokenizer((), skip_special or given is not None)
    text, offsets, position = "", [], 0
    for token in ids:
        offsets.append(position)
        piece = detokenizer.push(token)
        if given is not None and token in tokenizer.silent_ids:
            name = tokenizer.token_bytes[token].decode()
            piece = name if given.startswith(name, position) else ""
        text += piece
        position += len(piece)
    if given is None:
        return Echo(ids, text + detokenizer.finish(), tuple(offsets))
    return Echo(ids, given, tuple(min(offset, len(given)) for offset in offsets))
