"""Which server to talk to, with which key, and what every request asks of it."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from moe_runtime.errors import ConfigError
from moe_runtime.terminal.fields import Fields

KEY_VARIABLES = ("MOE_RUNTIME_API_KEY", "OPENAI_API_KEY")
MAX_TIMEOUT_S = 86400.0


@dataclass(frozen=True)
class Target:
    """url: the server's base with its version, such as http://127.0.0.1:8000/v1; model: None for the server's first.

    fields: further fields of each request. timeout_s: the longest wait for the next sign of the server.
    """

    url: str
    key: str | None = field(repr=False)
    model: str | None
    fields: Fields
    timeout_s: float


def make_target(url: str, key_file: Path | None, model: str | None, fields: Fields, timeout_s: float) -> Target:
    """Settle address and key. Raises ConfigError for an address, a key or a timeout that cannot be right."""
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(f"--timeout is {timeout_s:g}: expected more than 0 and at most {MAX_TIMEOUT_S:g} seconds")
    return Target(base_url(url), find_key(key_file), model, fields, timeout_s)


def base_url(url: str) -> str:
    """The address with its scheme (http by default) and version (/v1 by default), without a slash at the end."""
    whole = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        address = urlsplit(whole)
        known = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        known = False
    if not known or address.query or address.fragment or re.search(r"[\s\x00-\x1f\x7f]", whole):
        raise ConfigError(f"--url is {url!r}: expected an address such as http://127.0.0.1:8000")
    if "@" in address.netloc:
        raise ConfigError("--url must hold no password: give a key with --api-key-file")
    path = address.path.rstrip("/")
    versioned = any(re.fullmatch(r"v\d\w*", part) for part in path.split("/"))
    return f"{address.scheme}://{address.netloc}{path}{'' if versioned else '/v1'}"


def find_key(key_file: Path | None) -> str | None:
    """The file's first line with text, else the first variable of KEY_VARIABLES that is set, else no key."""
    if key_file is not None:
        return _usable_key(_first_line(key_file), f"--api-key-file {key_file}")
    for variable in KEY_VARIABLES:
        if key := os.environ.get(variable, "").strip():
            return _usable_key(key, variable)
    return None


def _first_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file {path} is not a text file") from error
    return next((line.strip() for line in lines if line.strip()), "")


def _usable_key(key: str, where: str) -> str:
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{where} holds no key: expected one line of printable characters without spaces")
    return key
