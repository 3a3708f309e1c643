"""Whatever can go wrong with a server, as one line that says what to do."""

import json
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import openai

from moe_runtime.terminal.target import Target
from moe_runtime.terminal.text import one_line

CONNECT_TIMEOUT_S = 5.0

_ADVICE = {
    401: "give a key with --api-key-file FILE or in MOE_RUNTIME_API_KEY",
    403: "give another key with --api-key-file FILE or in MOE_RUNTIME_API_KEY",
    429: "try again in a moment",
    502: "try again in a moment",
    503: "try again in a moment",
}


class ServerError(RuntimeError):
    """The server could not be reached, refused, or broke off; the message is one harmless line."""


@contextmanager
def explained(target: Target, in_answer: bool) -> Iterator[None]:
    """Raise every fault of talking to the server as ServerError. in_answer: the answer had already begun."""
    try:
        yield
    except TimeoutError as error:
        wait = f"the server sent nothing for {target.timeout_s:g} s; try again, or wait longer with --timeout"
        raise ServerError(wait) from error
    except openai.OpenAIError as error:
        raise ServerError(one_line(_explain(error, target, in_answer))) from error
    except (json.JSONDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ServerError(one_line(f"{target.url} does not answer in OpenAI's form ({error}); check --url")) from error


def _explain(error: openai.OpenAIError, target: Target, in_answer: bool) -> str:
    if isinstance(error, openai.APIStatusError):
        return _explain_status(error, target)
    if isinstance(error, openai.APIConnectionError):
        if in_answer:
            return "the answer broke off: the connection to the server was lost; see whether it still runs"
        if isinstance(error, openai.APITimeoutError):
            return f"{target.url} did not accept a connection within {CONNECT_TIMEOUT_S:g} s; check --url"
        return f"cannot reach {target.url} ({_cause(error)}); start the server, or give its address with --url"
    if in_answer:
        return f"the answer broke off: {error}"
    return str(error)


def _explain_status(error: openai.APIStatusError, target: Target) -> str:
    message = f"the server answered {error.status_code}: {_message(error)}"
    advice = _ADVICE.get(error.status_code, "")
    if error.status_code == 404:
        advice = f"check --url ({target.url}) and --model"
    return f"{message.rstrip('.')}; {advice}" if advice else message


def _message(error: openai.APIStatusError) -> str:
    """What the server says: OpenAI's `message`, FastAPI's `detail`, or the body as it is."""
    body = error.body
    if isinstance(body, dict):
        said = body.get("message") or body.get("detail") or body
        return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    return str(body or error.response.reason_phrase or "no reason given")


def _cause(error: BaseException) -> str:
    """The reason at the bottom: `Connection refused` rather than `All connection attempts failed`."""
    if isinstance(error, BaseExceptionGroup):
        return _cause(error.exceptions[0])
    if (deeper := error.__cause__ or error.__context__) is not None:
        return _cause(deeper)
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
