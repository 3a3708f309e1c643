"""Reading quantization_config key by key: values that are not understood and keys that nobody asked for are refused."""

from collections.abc import Iterable, Mapping
from typing import Any

from moe_runtime.errors import ConfigError

_REQUIRED = object()


class Fields:
    """One JSON object of config.json; `place` is its path in there, for messages."""

    def __init__(self, place: str, tree: object) -> None:
        self.place = place
        if not isinstance(tree, Mapping):
            raise self.refuse("", tree, "an object")
        self._tree, self._left = tree, set(tree)

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The key's value, or the default; ConfigError where it is missing and must be there."""
        self._left.discard(key)
        if key in self._tree:
            return self._tree[key]
        if default is _REQUIRED:
            raise ConfigError(f"config.json: {self._path(key)} is missing")
        return default

    def choose(self, key: str, supported: Iterable[object], default: Any = _REQUIRED) -> Any:
        """The key's value, which must be one of `supported`."""
        value, supported = self.take(key, default), tuple(supported)
        # 1 == True in Python, but `bits: true` is no number of bits.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in supported):
            raise self.refuse(key, value, ", ".join(map(repr, supported)))
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty where the key is null or missing."""
        value = self.take(key, None) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise self.refuse(key, value, "a list of names")
        return tuple(value)

    def objects(self, key: str) -> dict[str, "Fields"]:
        """An object of objects."""
        value = self.take(key)
        if not isinstance(value, Mapping) or not value:
            raise self.refuse(key, value, "an object of objects")
        return {name: Fields(f"{self._path(key)}.{name}", tree) for name, tree in value.items()}

    def ignore(self, keys: Iterable[str]) -> None:
        """Keys that say how the weights were found, and nothing about how they are stored."""
        self._left.difference_update(keys)

    def finish(self) -> None:
        """Refuse what is left."""
        if self._left:
            key = min(self._left)
            raise self.refuse(key, self._tree[key], "no such key: it is not known what it does to the weights")

    def refuse(self, key: str, value: object, supported: str) -> ConfigError:
        return ConfigError(f"config.json: {self._path(key)} is {value!r}: supported is {supported}")

    def _path(self, key: str) -> str:
        return f"{self.place}.{key}" if key else self.place
