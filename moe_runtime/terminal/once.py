"""One answer without a terminal's comforts: plain text on stdout, faults on stderr, an exit code."""

import os
import sys
from contextlib import aclosing

from moe_runtime.errors import ConfigError
from moe_runtime.terminal.answer import Answer
from moe_runtime.terminal.faults import ServerError
from moe_runtime.terminal.interrupts import Interrupts
from moe_runtime.terminal.screen import make_printable
from moe_runtime.terminal.text import neutralise

FAILED = 1
INTERRUPTED = 130
READER_GONE = 141


def read_stdin() -> str:
    """All of stdin, less the newline that ends its last line. Raises ConfigError if it is empty or not UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error
    if not text.strip():
        raise ConfigError("stdin holds no text to answer")
    return text.removesuffix("\n")


async def answer_once(answer: Answer) -> int:
    """Print the answer as it streams, ended by a newline, and return the exit code. Reasoning is left out."""
    make_printable()
    try:
        with Interrupts() as interrupts:
            whole = await interrupts.run(_print(answer))
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # Whoever read stdout has gone; without this the interpreter would complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return 0 if whole else INTERRUPTED


async def _print(answer: Answer) -> None:
    try:
        async with aclosing(aiter(answer)) as pieces:
            async for piece in pieces:
                if not piece.thought:
                    print(neutralise(piece.text), end="", flush=True)
    finally:
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
