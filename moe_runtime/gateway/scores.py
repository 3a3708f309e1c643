"""Scores of tokens on their way to the client, each with the text that it belongs to and no earlier."""

from collections import deque
from collections.abc import Callable

import msgspec

from moe_runtime.protocol.messages import TokenScore


class ScoredToken(msgspec.Struct, frozen=True):
    """A token whose text is in the answer. offset: the characters of the choice's text that were complete before it.

    So a token inside a character has that character's offset. score: None for a prompt's first token.
    """

    token: int
    offset: int
    score: TokenScore | None


class HeldScores:
    """Scores of one choice's tokens, until their text is sent. offset: characters before the first one's."""

    def __init__(self, offset: int = 0) -> None:
        self._completed = offset
        self._sent = offset
        # With the number of characters that must be sent before.
        self._waiting: deque[tuple[int, ScoredToken]] = deque()

    def add(self, token: int, score: TokenScore, chars: int) -> None:
        """A token that completed so many characters; with none it waits for the next one, of which it may be a part."""
        scored = ScoredToken(token, self._completed, score)
        self._waiting.append((self._completed + max(chars, 1), scored))
        self._completed += chars

    def sent(self, chars: int) -> tuple[ScoredToken, ...]:
        """So many more characters are sent: the tokens whose text is out."""
        self._sent += chars
        return self._take(lambda end, scored: end <= self._sent)

    def cut(self, chars: int) -> tuple[ScoredToken, ...]:
        """These are the last characters, whatever the tokens completed: the tokens whose text has begun by then."""
        self._sent += chars
        return self._take(lambda end, scored: scored.offset < self._sent)

    def rest(self) -> tuple[ScoredToken, ...]:
        """All text is sent."""
        return self._take(lambda end, scored: True)

    def _take(self, ready: Callable[[int, ScoredToken], bool]) -> tuple[ScoredToken, ...]:
        taken = []
        while self._waiting and ready(*self._waiting[0]):
            taken.append(self._waiting.popleft()[1])
        return tuple(taken)
