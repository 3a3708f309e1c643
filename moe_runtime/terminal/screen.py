"""What the operator sees: answers as they are, remarks dim, errors red; no colour where there is none."""

import sys
from contextlib import aclosing
from io import TextIOWrapper

from rich.console import Console

from moe_runtime.terminal.answer import Answer
from moe_runtime.terminal.text import neutralise


class Screen:
    """Writes to stdout. Text of the model and of the server is neutralised and never read as markup."""

    def __init__(self) -> None:
        make_printable()
        self._console = Console(highlight=False, soft_wrap=True)
        self._at_line_start = True

    async def show(self, answer: Answer) -> None:
        """The answer's pieces as they come. Raises ServerError."""
        thinking = False
        async with aclosing(aiter(answer)) as pieces:
            async for piece in pieces:
                if thinking and not piece.thought:
                    self.end_line()
                thinking = piece.thought
                self._write(neutralise(piece.text), "dim" if thinking else None)

    def end_line(self) -> None:
        """Begin a new line if something stands on this one."""
        if not self._at_line_start:
            self._write("\n")

    def note(self, text: str) -> None:
        self.end_line()
        self._write(f"{neutralise(text)}\n", "dim")

    def error(self, text: str) -> None:
        self.end_line()
        self._write(f"error: {neutralise(text)}\n", "red")

    def say(self, text: str) -> None:
        self.end_line()
        self._write(f"{neutralise(text)}\n")

    def _write(self, text: str, style: str | None = None) -> None:
        if not text:
            return
        if style is None:
            # Not through rich, which would turn tabs into spaces without knowing the column.
            self._console.file.write(text)
        else:
            self._console.print(text, style=style, end="", markup=False, emoji=False)
        self._console.file.flush()
        self._at_line_start = text.endswith("\n")


def make_printable() -> None:
    """Let no character end the program: what stdout's encoding cannot say becomes a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
