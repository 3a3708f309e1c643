"""API keys: the check that no request passes without one."""

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from moe_runtime.api_keys import read_keys
from moe_runtime.gateway.error_answers import error_answer
from moe_runtime.gateway.errors import ApiError

# What tells nobody anything about a model or a text, and what probes and scrapers ask for. All else needs a key.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})


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
    """The keys of the file (gateway.api_key_file) and of the environment; None if neither is given. See read_keys."""
    keys = read_keys(key_file, environment)
    return ApiKeys(keys) if keys else None


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
