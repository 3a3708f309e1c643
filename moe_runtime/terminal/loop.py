"""The loop of both commands on a terminal: read a line, do what it asks for, go on."""

import sys
from collections.abc import Mapping
from typing import Protocol

from moe_runtime.errors import ConfigError
from moe_runtime.terminal.answer import Answer, summary
from moe_runtime.terminal.client import Client
from moe_runtime.terminal.commands import Ask, Command, Leave, Outcome, Say, interpret
from moe_runtime.terminal.faults import ServerError
from moe_runtime.terminal.interrupts import Interrupts
from moe_runtime.terminal.line_input import LineInput
from moe_runtime.terminal.screen import Screen


class Talk(Protocol):
    """What the loop drives: a conversation, or prompts one by one."""

    @property
    def commands(self) -> Mapping[str, Command]: ...

    def ask(self, text: str) -> Answer:
        """The answer to this text, not yet begun."""

    def answered(self, text: str) -> None:
        """What came of it: whole, in part, or empty."""


def on_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


class Loop:
    """Goes on whatever the server does; ends with Ctrl-D or /exit."""

    def __init__(self, talk: Talk, line_input: LineInput, interrupts: Interrupts) -> None:
        self._talk = talk
        self._line_input = line_input
        self._interrupts = interrupts
        self._screen = Screen()

    async def run(self, client: Client) -> None:
        await self._greet(client)
        while True:
            try:
                line = await self._line_input.read()
                outcome = interpret(line, self._talk.commands) if line.strip() else Say("")
            except KeyboardInterrupt:
                outcome = Say("Ctrl-D or /exit leaves.")
            except EOFError:
                return
            except ConfigError as error:
                self._screen.error(str(error))
                continue
            if isinstance(outcome, Leave):
                return
            await self._do(outcome)

    async def _greet(self, client: Client) -> None:
        """Say who answers; a server that cannot be reached now may be there for the first question."""

        async def say_model() -> None:
            self._screen.note(f"{await client.model()} at {client.target.url}")

        try:
            await self._interrupts.run(say_model())
        except ServerError as error:
            self._screen.error(str(error))
        if self._line_input.warning:
            self._screen.note(self._line_input.warning)
        self._screen.note("/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves.")

    async def _do(self, outcome: Outcome) -> None:
        if isinstance(outcome, Ask):
            await self._answer(outcome.text)
        elif isinstance(outcome, Say) and outcome.text:
            self._screen.say(outcome.text)

    async def _answer(self, text: str) -> None:
        answer = self._talk.ask(text)
        try:
            whole = await self._interrupts.run(self._screen.show(answer))
            self._screen.note(summary(answer, stopped=not whole))
        except ServerError as error:
            self._screen.error(f"{error} (/retry asks again)")
        self._talk.answered(answer.text)
