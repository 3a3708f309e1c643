"""The bytes that each token stands for, worked out from the tokenizer's own decoder."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Byte-level tokenizers write printable bytes as themselves and the others as the characters from 256 on (GPT-2).
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(sorted(set(range(256)) - set(_PRINTABLE)))
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, found when first asked for; tokens of `hidden` and ids beyond the vocabulary have none.

    exact: joined, the bytes are the text of any sequence (byte-level and byte-fallback decoders); where they are not,
    each is the text that the token has alone. strips_space: a text loses one space at its beginning.
    """

    def __init__(self, backend: Any, hidden: Collection[int] = ()) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._backend = backend
        steps = _steps(backend)
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._replacements = _byte_fallback(steps)
        self.exact = self._byte_level or self._replacements is not None
        self.strips_space = self._replacements is not None and kinds[-1] == "Strip"

    def __missing__(self, token: int) -> bytes:
        self[token] = found = self._find(token)
        return found

    def _find(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level:
            # Added tokens are plain text, and may hold characters that stand for no byte.
            plain = not all(char in _BYTE_OF_CHAR for char in name)
            return name.encode() if plain else bytes(_BYTE_OF_CHAR[char] for char in name)
        if self._replacements is None:
            return self._backend.decode([token], skip_special_tokens=False).encode()
        for old, new in self._replacements.items():
            name = name.replace(old, new)
        byte = _FALLBACK.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.encode()


def token_text(data: bytes) -> str:
    r"""A token as programs see it in log-probabilities: its text, or `bytes:\xNN...` if it is none alone."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _steps(backend: Any) -> Sequence[Mapping[str, Any]]:
    if backend.decoder is None:
        return ()
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else (decoder,)


def _byte_fallback(steps: Sequence[Mapping[str, Any]]) -> Mapping[str, str] | None:
    """What to replace in each token, if the decoder is sentencepiece's: Replace..., ByteFallback, Fuse, maybe Strip."""
    kinds = [step["type"] for step in steps]
    replaces = [step for step in steps if step["type"] == "Replace"]
    rest = kinds[len(replaces) :]
    if rest == ["ByteFallback", "Fuse", "Strip"]:
        last = steps[-1]
        if (last["content"], last["start"], last["stop"]) != (" ", 1, 0):
            return None
    elif rest != ["ByteFallback", "Fuse"]:
        return None
    if kinds[: len(replaces)] != ["Replace"] * len(replaces) or any("String" not in r["pattern"] for r in replaces):
        return None
    return {step["pattern"]["String"]: step["content"] for step in replaces}
