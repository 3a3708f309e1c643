"""chat_template_kwargs: what a client may hand to the model's own chat template."""

import re
from collections.abc import Mapping
from typing import Any

from moe_runtime.gateway.errors import ApiError, invalid, shorten

FIELD = "chat_template_kwargs"
# What the renderer itself says to the template, and its own switches.
_RESERVED = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
_NAME = re.compile("(?!return_)[A-Za-z][A-Za-z0-9_]{0,63}")
_MAX_NUMBER = 1_000_000
_MAX_CHARS = 8192
_MAX_VALUES = 256
_MAX_DEPTH = 8


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises ApiError 400 for names that are not the template's to define, and for values that could cost much.

    A template may repeat a text as often as a number says, or go through a list within a list, and nothing stops it
    while it runs: so numbers, and the size of everything together, are bounded here.
    """
    for name in variables:
        if name in _RESERVED or not _NAME.fullmatch(name):
            raise _refused(f"{shorten(name)} is no name that it may define")
    _Budget().spend(variables, 0)


class _Budget:
    def __init__(self) -> None:
        self._chars = _MAX_CHARS
        self._values = _MAX_VALUES

    def spend(self, value: Any, depth: int) -> None:
        self._values -= 1
        if isinstance(value, str):
            self._chars -= len(value)
        elif isinstance(value, int | float) and not -_MAX_NUMBER <= value <= _MAX_NUMBER:
            raise _refused(f"the number {shorten(value)} is not within -{_MAX_NUMBER} and {_MAX_NUMBER}")
        if depth > _MAX_DEPTH:
            raise _refused(f"values are nested more than {_MAX_DEPTH} deep")
        if self._values < 0 or self._chars < 0:
            raise _refused(f"at most {_MAX_VALUES} values and {_MAX_CHARS} characters are allowed, names included")
        if isinstance(value, dict):
            for name, inner in value.items():
                self._chars -= len(name)
                self.spend(inner, depth + 1)
        elif isinstance(value, list):
            for inner in value:
                self.spend(inner, depth + 1)


def _refused(message: str) -> ApiError:
    return invalid(f"{FIELD}: {message}", FIELD)
