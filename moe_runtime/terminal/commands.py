"""Lines that begin with a slash, and what a line asks for."""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_runtime.errors import ConfigError
from moe_runtime.terminal.fields import Fields, parse_field


@dataclass(frozen=True)
class Ask:
    """Put this to the model."""

    text: str


@dataclass(frozen=True)
class Say:
    """Tell the operator this."""

    text: str


@dataclass(frozen=True)
class Leave:
    """End the program."""


Outcome = Ask | Say | Leave


@dataclass(frozen=True)
class Command:
    """usage: its name and arguments, as /help shows them; run: gets the text after the name, raises ConfigError."""

    usage: str
    purpose: str
    run: Callable[[str], Outcome]


def command_table(commands: list[Command]) -> dict[str, Command]:
    """The commands by name, with /help before and /exit after them."""

    def show_help(_: str) -> Outcome:
        width = max(len(command.usage) for command in table.values())
        lines = [f"{command.usage:{width}}  {command.purpose}" for command in table.values()]
        return Say("\n".join([*lines, *_KEYS]))

    everything = [
        Command("/help", "show this", show_help),
        *commands,
        Command("/exit", "leave, as Ctrl-D does", lambda _: Leave()),
    ]
    table = {command.usage.split()[0]: command for command in everything}
    return table


def interpret(line: str, commands: Mapping[str, Command]) -> Outcome:
    """What a typed line asks for: a command after one slash, else text for the model; // stands for a text's own slash.

    Raises ConfigError for a command that does not exist, and what the command raises.
    """
    if not line.startswith("/"):
        return Ask(line)
    if line.startswith("//"):
        return Ask(line[1:])
    name, *rest = line.split(maxsplit=1)
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "see /help"
        raise ConfigError(f"no command {name}; {hint} (a text that begins with / is written with //)")
    return commands[name].run(rest[0].rstrip() if rest else "")


def set_command(fields: Fields) -> Command:
    """/set over these fields: changes one, or lists them."""

    def run(assignment: str) -> Outcome:
        if assignment:
            name, value = parse_field(assignment)
            fields[name] = value
        return Say(_show(fields) or "no fields are set: the server's defaults hold")

    return Command("/set [FIELD=VALUE]", "set a request field (null: the server's default), or list them", run)


def _show(fields: Fields) -> str:
    """One field a line, as it can be typed."""
    return "\n".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())


_KEYS = (
    "",
    "Alt-Enter, or \\ before Enter, begins a new line; Up brings back what you typed before, Ctrl-R searches it.",
    "Ctrl-C stops an answer and keeps what came of it.",
)
