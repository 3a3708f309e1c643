"""`moe-runtime chat`: a conversation on a terminal, or one answer to stdin."""

import asyncio
from contextlib import aclosing
from pathlib import Path

from moe_runtime.terminal.answer import Answer
from moe_runtime.terminal.client import Client
from moe_runtime.terminal.commands import Ask, Command, Outcome, Say, command_table, set_command
from moe_runtime.terminal.conversation import Conversation
from moe_runtime.terminal.interrupts import Interrupts
from moe_runtime.terminal.line_input import LineInput
from moe_runtime.terminal.loop import Loop, on_terminal
from moe_runtime.terminal.once import answer_once, read_stdin
from moe_runtime.terminal.target import Target


def chat(target: Target, system: str | None, remember: bool) -> int:
    """Converse until the operator leaves, or answer stdin once where there is no terminal; returns the exit code."""
    if on_terminal():
        return asyncio.run(_converse(target, system, remember))
    return asyncio.run(_answer(target, system, read_stdin()))


class ChatTalk:
    """A conversation with one server, and the commands that change it."""

    def __init__(self, client: Client, conversation: Conversation) -> None:
        self._client = client
        self._conversation = conversation
        self._fields = dict(client.target.fields)
        self.commands = command_table(
            [
                Command("/system [TEXT]", "set the system message, or remove it", self._set_system),
                set_command(self._fields),
                Command("/reset", "forget what was said", self._reset),
                Command("/retry", "ask the last question again", lambda _: Ask(conversation.take_back())),
                Command("/undo", "take back the last question and its answer", self._undo),
                Command("/save FILE", "write the conversation to a new file, as JSON", self._save),
            ]
        )

    def ask(self, text: str) -> Answer:
        return self._client.chat(self._conversation.ask(text), self._fields)

    def answered(self, text: str) -> None:
        self._conversation.answered(text)

    def _set_system(self, text: str) -> Outcome:
        self._conversation.system = text or None
        return Say("the system message is set" if text else "no system message")

    def _reset(self, _: str) -> Outcome:
        self._conversation.reset()
        return Say("all is forgotten but the system message and the fields")

    def _undo(self, _: str) -> Outcome:
        return Say(f"taken back: {self._conversation.take_back()}")

    def _save(self, name: str) -> Outcome:
        path = Path(name).expanduser()
        self._conversation.save(path)
        return Say(f"saved in {path}")


async def _converse(target: Target, system: str | None, remember: bool) -> int:
    async with aclosing(Client(target)) as client:
        with Interrupts() as interrupts:
            talk = ChatTalk(client, Conversation(system))
            await Loop(talk, LineInput("chat", remember), interrupts).run(client)
    return 0


async def _answer(target: Target, system: str | None, question: str) -> int:
    async with aclosing(Client(target)) as client:
        return await answer_once(client.chat(Conversation(system).ask(question), target.fields))
