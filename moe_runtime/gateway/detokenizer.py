"""Tokens to text, one token at a time, without ever sending half a character."""

from collections.abc import Callable, Collection, Sequence

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three replacement marks at the end can still become one.
_UNSTABLE_CHARS = 4
# Tokens that show text have at least one byte each: more than the unstable characters and one cut in half.
_CONTEXT_TOKENS = 20
_MAX_WINDOW = 40


class Detokenizer:
    """Text of a growing token sequence; the pieces of push() and finish() joined are the text of the whole.

    decode: ids to text, undecodable bytes as U+FFFD. silent_ids: tokens without text (special ones, and ids beyond the
    tokenizer's vocabulary). context_ids: the prompt's end, since some tokenizers write a word's leading space only
    after another word. The text depends on the tokens alone, not on how they arrive in groups.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], silent_ids: Collection[int] = (), context_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._silent_ids = silent_ids
        self._window = [token for token in context_ids[-_CONTEXT_TOKENS:] if token not in silent_ids]
        self._text = decode(self._window)
        if self._text.endswith(_REPLACEMENT):
            self._window, self._text = [], ""
        # Tokens of the window whose text was sent (they stay as context), and how many characters that was.
        self._sent_tokens = len(self._window)
        self._sent_chars = len(self._text)

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if token in self._silent_ids:
            return ""
        self._window.append(token)
        self._text = self._decode(self._window)
        if self._text.endswith(_REPLACEMENT):
            return self._give_up_on_garbage() if len(self._window) > _MAX_WINDOW else ""
        piece = self._text[self._sent_chars :]
        if piece or len(self._window) > _MAX_WINDOW:
            self._restart(self._sent_tokens, unsent_chars=0)
        return piece

    def finish(self) -> str:
        """What is left at the end, unfinished characters as U+FFFD."""
        piece = self._text[self._sent_chars :]
        self._sent_chars = len(self._text)
        return piece

    def _give_up_on_garbage(self) -> str:
        """A long run without a finished character: send all but what may still become one; this bounds the work."""
        piece = self._text[self._sent_chars : -_UNSTABLE_CHARS]
        sent_chars = max(self._sent_chars, len(self._text) - _UNSTABLE_CHARS)
        self._restart(len(self._window) - _CONTEXT_TOKENS, unsent_chars=len(self._text) - sent_chars)
        return piece

    def _restart(self, first_token: int, unsent_chars: int) -> None:
        self._window = self._window[first_token:]
        self._text = self._decode(self._window)
        self._sent_tokens = len(self._window)
        self._sent_chars = len(self._text) - unsent_chars
