"""Where API keys come from: for the gateway, which checks them, and for the launcher, which asks it a question."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_runtime.errors import ConfigError

VARIABLE = "MOE_RUNTIME_API_KEYS"
_KEY = re.compile(r"[!-~]{1,512}")


def read_keys(key_file: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of the file (gateway.api_key_file) and of the environment; empty if neither is given.

    Raises ConfigError for a place that is named but has no key, and never shows one.
    """
    return (*_from_file(key_file), *_from_environment(environment))


def _from_file(key_file: str | None) -> Sequence[str]:
    if key_file is None:
        return ()
    place = f"gateway.api_key_file {key_file!r}"
    try:
        lines = Path(key_file).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{place} is not UTF-8 text") from error
    entries = {f"line {number}": line.strip() for number, line in enumerate(lines, 1)}
    return _checked({name: text for name, text in entries.items() if text and not text.startswith("#")}, place)


def _from_environment(environment: Mapping[str, str]) -> Sequence[str]:
    if VARIABLE not in environment:
        return ()
    entries = {f"entry {number}": text.strip() for number, text in enumerate(environment[VARIABLE].split(","), 1)}
    return _checked({name: text for name, text in entries.items() if text}, f"the environment's {VARIABLE}")


def _checked(entries: Mapping[str, str], place: str) -> Sequence[str]:
    for name, key in entries.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{place}: {name} is no key: expected 1 to 512 printable ASCII characters, no spaces")
    if not entries:
        raise ConfigError(f"{place} holds no key; leave it out to serve without keys")
    return tuple(entries.values())
