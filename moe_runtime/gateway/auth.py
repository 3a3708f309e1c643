"""API keys: where they come from, and the check that no request passes without one."""

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from moe_runtime.errors import ConfigError
from moe_runtime.gateway.error_answers import error_answer
from moe_runtime.gateway.errors import ApiError

VARIABLE = "MOE_RUNTIME_API_KEYS"
# What tells nobody anything about a model or a text, and what probes and scrapers ask for. All else needs a key.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})
_KEY = re.compile(r"[!-~]{1,512}")


class ApiKeys:
    """A set of keys, of which only the SHA-256 digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(sha256(key.encode()).digest() for key in keys)

    def know(self, key: bytes) -> bool:
        """In a time that depends neither on the key nor on whether and where it is found."""
        digest = sha256(key).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def load_keys(key_file: str | None, environment: Mapping[str, str]) -> ApiKeys | None:
    """The keys of the file (gateway.api_key_file) and of the environment; None if neither is given.

    Raises ConfigError for a place that is named but has no key, and never shows one.
    """
    keys = [*_from_file(key_file), *_from_environment(environment)]
    return ApiKeys(keys) if keys else None


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


class RequireKey:
    """ASGI middleware: 401 without a known key, before anything of the body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None if scope["path"] in OPEN_PATHS else self._refusal(scope)
        app = self._app if error is None else error_answer(error)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer":
            return _unauthorized("an API key is needed, sent once as `Authorization: Bearer KEY`")
        return None if self._keys.know(key.strip()) else _unauthorized("the API key is not one of this server's")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
