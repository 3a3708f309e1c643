"""`moe-runtime complete`: the text after a prompt, once, or prompt after prompt on a terminal."""

import asyncio
from contextlib import aclosing

from moe_runtime.errors import ConfigError
from moe_runtime.terminal.answer import Answer
from moe_runtime.terminal.client import Client
from moe_runtime.terminal.commands import Ask, Command, Outcome, command_table, set_command
from moe_runtime.terminal.interrupts import Interrupts
from moe_runtime.terminal.line_input import LineInput
from moe_runtime.terminal.loop import Loop, on_terminal
from moe_runtime.terminal.once import answer_once, read_stdin
from moe_runtime.terminal.target import Target
from moe_runtime.terminal.text import well_formed

STDIN = "-"


def complete(target: Target, prompt: str | None, remember: bool) -> int:
    """Complete the prompt (STDIN: all of stdin), or without one loop on a terminal; returns the exit code."""
    if prompt is None and on_terminal():
        return asyncio.run(_loop(target, remember))
    text = read_stdin() if prompt in (None, STDIN) else well_formed(prompt)
    return asyncio.run(_complete(target, text))


class PromptTalk:
    """Prompts that know nothing of each other."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._fields = dict(client.target.fields)
        self._prompt: str | None = None
        self.commands = command_table(
            [set_command(self._fields), Command("/retry", "complete the last prompt again", self._retry)]
        )

    def ask(self, text: str) -> Answer:
        self._prompt = text
        return self._client.complete(text, self._fields)

    def answered(self, text: str) -> None:
        """Nothing is kept."""

    def _retry(self, _: str) -> Outcome:
        if self._prompt is None:
            raise ConfigError("nothing has been completed yet")
        return Ask(self._prompt)


async def _loop(target: Target, remember: bool) -> int:
    async with aclosing(Client(target)) as client:
        with Interrupts() as interrupts:
            await Loop(PromptTalk(client), LineInput("complete", remember), interrupts).run(client)
    return 0


async def _complete(target: Target, prompt: str) -> int:
    async with aclosing(Client(target)) as client:
        return await answer_once(client.complete(prompt, target.fields))
