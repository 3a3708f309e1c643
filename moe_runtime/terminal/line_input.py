"""The line that the operator types: edited with prompt-toolkit, remembered in a file."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.utils import is_dumb_terminal

from moe_runtime.terminal.text import well_formed

PROMPT = FormattedText([("bold", "> ")])
CONTINUATION = FormattedText([("", ". ")])


class LineInput:
    """Enter sends; Alt-Enter, or Enter after a backslash, begins a new line.

    name: the command, which has a history of its own; remember False keeps the history in memory only.
    warning: why nothing is remembered, if that is not what was asked for.
    """

    def __init__(self, name: str, remember: bool) -> None:
        self.warning: str | None = None
        # Else prompt-toolkit greets a dumb terminal with an escape sequence.
        output = PlainTextOutput(sys.stdout) if is_dumb_terminal() else None
        with create_app_session(output=output):
            self._session: PromptSession[str] = PromptSession(
                PROMPT,
                multiline=True,
                prompt_continuation=CONTINUATION,
                key_bindings=_bindings(),
                history=self._open_history(name) if remember else InMemoryHistory(),
                enable_suspend=True,
            )

    async def read(self) -> str:
        """What was typed; empty if Ctrl-C dropped it. Raises KeyboardInterrupt for Ctrl-C when there was nothing to
        drop, and EOFError for Ctrl-D."""
        try:
            # prompt-toolkit's own handling of the signal would take the place of Interrupts'.
            return well_formed(await self._session.prompt_async(handle_sigint=False))
        except KeyboardInterrupt:
            if not self._session.default_buffer.text:
                raise
            return ""

    def _open_history(self, name: str) -> History:
        try:
            path = history_path(name)
            make_private(path)
        except (OSError, RuntimeError) as error:
            self.warning = f"what you type is not remembered: {error}"
            return InMemoryHistory()
        return _PrivateHistory(str(path))


class _PrivateHistory(FileHistory):
    """Goes on in memory when the file can no longer be written, say on a full disk."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(well_formed(string))


def history_path(name: str) -> Path:
    """This command's file in XDG_STATE_HOME, by default ~/.local/state. Raises RuntimeError where there is no home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = state if state.is_absolute() else Path.home() / ".local" / "state"
    return home / "moe-runtime" / f"{name}_history"


def make_private(path: Path) -> None:
    """Make the file if it is not there, readable for its owner only. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _bindings() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.endswith("\\"):
            buffer.text = f"{buffer.text[:-1]}\n"
            buffer.cursor_position = len(buffer.text)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
