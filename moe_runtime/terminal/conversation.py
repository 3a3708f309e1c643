"""The state of a chat: what was said, and the question that has no answer yet."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from moe_runtime.errors import ConfigError
from moe_runtime.terminal.client import Message


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str


@dataclass
class Conversation:
    """Whole turns only: a question that got no text is kept apart, since many chat templates refuse two in a row."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    unanswered: str | None = None

    def ask(self, question: str) -> list[Message]:
        """The messages that put this question."""
        self.unanswered = question
        return [*self.messages(), {"role": "user", "content": question}]

    def answered(self, text: str) -> None:
        """What came of the answer, whole or not; with no text at all the question stays unanswered."""
        if text:
            assert self.unanswered is not None
            self.turns.append(Turn(self.unanswered, text))
            self.unanswered = None

    def messages(self) -> list[Message]:
        said = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            said += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return said

    def take_back(self) -> str:
        """Forget the last question and its answer, and return the question. Raises ConfigError if there is none."""
        if self.unanswered is None and not self.turns:
            raise ConfigError("nothing has been asked yet")
        question, self.unanswered = self.unanswered, None
        return question if question is not None else self.turns.pop().question

    def reset(self) -> None:
        self.turns.clear()
        self.unanswered = None

    def save(self, path: Path) -> None:
        """Write the messages as JSON, as a request carries them. Raises ConfigError; overwrites nothing."""
        text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2) + "\n"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text))
        except FileExistsError as error:
            raise ConfigError(f"{path} exists; give another name") from error
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error


# What JSON may hold as it is, but a terminal that shows the file would obey.
_CONTROL = re.compile(r"[\x7f-\x9f]")
