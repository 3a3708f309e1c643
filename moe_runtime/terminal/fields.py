"""Request fields as an operator types them: NAME=VALUE, the value in YAML."""

import json
from typing import Any

import yaml

from moe_runtime.errors import ConfigError

Fields = dict[str, Any]

_OWN = {
    "model": "--model names the model",
    "messages": "what you type are the messages",
    "prompt": "what you type is the prompt",
    "stream": "answers always stream here",
    "n": "a terminal shows one answer",
    "best_of": "a terminal shows one answer",
}


def read_fields(assignments: list[str]) -> Fields:
    """Fields from NAME=VALUE texts, a later one over an earlier one. Raises ConfigError naming the text at fault."""
    return dict(parse_field(assignment) for assignment in assignments)


def parse_field(assignment: str) -> tuple[str, Any]:
    """One field's name and its value as JSON will carry it; null asks for the field to be left out.

    Which fields exist is the server's to say. Raises ConfigError.
    """
    name, separator, text = assignment.partition("=")
    name = name.strip()
    if not separator or not name:
        raise ConfigError(f"{assignment!r}: expected field=value, for example top_k=40")
    if name in _OWN:
        raise ConfigError(f"{name} cannot be set: {_OWN[name]}")
    return name, check_value(name, _parse_value(name, text))


def check_value(name: str, value: Any) -> Any:
    """The value as JSON has it: text keys, no NaN. Raises ConfigError for what JSON cannot say."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: JSON has no such value ({error})") from error


def _parse_value(name: str, text: str) -> Any:
    """JSON first, since YAML takes 1e-5 for a text."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {text!r} is not a YAML value") from error
