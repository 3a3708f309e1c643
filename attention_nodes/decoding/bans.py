"""Tokens that a request may not draw next because of its own text so far: bad words, and stop tokens too early."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Bans:
    """One request's rules. Which of them hold is a function of the text alone, looked up by its last token."""

    def __init__(
        self, bad_words: Sequence[Sequence[int]], stop_token_ids: Sequence[int], min_tokens: int, vocab: int
    ) -> None:
        self._min_tokens = min_tokens
        # A checkpoint's end-of-text id may lie beyond its vocabulary: it is never drawn, so there is nothing to ban.
        stops = [token for token in stop_token_ids if 0 <= token < vocab] if min_tokens else []
        self._single = np.array([word[0] for word in bad_words if len(word) == 1], np.int64)
        self._with_stops = np.concatenate([self._single, np.array(stops, np.int64)])
        self._endings: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in bad_words:
            if len(word) > 1:
                self._endings[word[-2]].append((list(word[:-1]), word[-1]))

    def banned(self, tokens: Sequence[int], generated: int) -> NDArray[np.int64]:
        """Token ids that may not follow `tokens`, prompt and output, of which the last `generated` are output.

        A bad word's last token is banned after its others, wherever they stand (as transformers' NoBadWords does).
        """
        always = self._with_stops if generated < self._min_tokens else self._single
        endings = self._endings.get(tokens[-1])
        if endings is None:
            return always
        last = [token for before, token in endings if tokens[-len(before) :] == before]
        return np.concatenate([always, np.array(last, np.int64)])
