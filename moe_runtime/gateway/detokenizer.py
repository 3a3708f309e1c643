"""Tokens to text, one token at a time, without ever sending half a character."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from moe_runtime.gateway.token_bytes import TokenBytes

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three replacement marks at the end can still become one.
_UNSTABLE_CHARS = 4
# Tokens that show text have at least one byte each: more than the unstable characters and one cut in half.
_CONTEXT_TOKENS = 20
_MAX_WINDOW = 40

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text of a growing token sequence; the pieces of push() and finish() joined are the text of the whole.

    The text depends on the tokens alone, not on how they arrive in groups. The prompt counts as what came before, since
    some tokenizers drop a text's first space. A prompt that ends inside a character takes nothing from the text.
    """

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""

    def finish(self) -> str:
        """What is left at the end, unfinished characters as U+FFFD."""


class ByteDetokenizer:
    """For tokenizers of which every token's bytes are known (TokenBytes.exact); bytes that are no character are U+FFFD.

    In a run of byte-fallback tokens with a fault, tokenizers' own decode() gives up the good characters too; here they
    stay, for they may have been sent before the fault came.
    """

    def __init__(self, token_bytes: TokenBytes, context_ids: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._decode = _Utf8Decoder("replace").decode
        self._strips = token_bytes.strips_space and not any(token_bytes[token] for token in context_ids)

    def push(self, token: int) -> str:
        data = self._bytes[token]
        if self._strips and data:
            self._strips = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any tokenizer: decodes the last tokens again with each new one, and sends what has become longer.

    decode: ids to text, undecodable bytes as U+FFFD. silent_ids: tokens without text (special ones, and ids beyond the
    tokenizer's vocabulary). context_ids: the prompt's end.
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
