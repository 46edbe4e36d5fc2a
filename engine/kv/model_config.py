"""Typed reading of a Hugging Face config.json: names by which families call the same thing, one-line refusals.

Knows JSON, nothing of caches. Never guesses: a value that no caller named a default for must be there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from blockferry.engine.errors import ConfigError

MAX_SIZE = 1 << 40  # tokens, channels
MAX_COUNT = 10_000  # layers, heads
TEXT_SECTIONS = ("text_config", "language_config", "llm_config", "thinker_config")


class ModelConfig:
    """The language model's part of a config.json, read key by key. Raises ConfigError for what is missing or wrong."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """`values` is the whole document; models that also see or hear keep their language model in a section of it."""
        if not isinstance(values, Mapping):
            raise ConfigError("config.json", f"holds a {type(values).__name__}, not an object of keys and values")
        inner = next((values[name] for name in TEXT_SECTIONS if isinstance(values.get(name), Mapping)), None)
        if inner is None:
            self._values = dict(values)
            return
        # thinker_config has a text_config of its own; what the section leaves out, the document may say
        outer = {key: value for key, value in values.items() if _is_shared(key, value)}
        self._values = outer | ModelConfig(inner)._values

    def has(self, name: str) -> bool:
        """Whether the key has a value that says something: not null, false, 0 or empty."""
        return bool(self._values.get(name))

    def names(self) -> list[str]:
        """Every key that has() is true of."""
        return [name for name in self._values if self.has(name)]

    def section(self, name: str) -> ModelConfig:
        """The mapping under a key; an empty one where there is none."""
        value = self._values.get(name)
        return ModelConfig(value if isinstance(value, Mapping) else {})

    @property
    def model_type(self) -> str:
        """Family name, such as gemma3_text."""
        return self.text("model_type", "")

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str | int):
            raise ConfigError("config.json", f"{name} is {_quote(value)}; it must be a string")
        return default if value is None else str(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError("config.json", f"{name} is {_quote(value)}; it must be true or false")
        return value

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of these that has a value: a whole number above 0."""
        value = self.find_integer(*names)
        if value is not None:
            return value
        if default is None:
            raise ConfigError("config.json", f"{' or '.join(names)} is missing; the model cannot be known without it")
        return default

    def find_integer(self, *names: str) -> int | None:
        """The same, or None where none of them has a value."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            return _whole_number(name, value, least=1)
        return None

    def number(self, *names: str, default: float, above: float | None = None) -> float:
        """The first of these that has a value: finite, and above a bound where there is one."""
        value = self.find_number(*names, above=above)
        return default if value is None else value

    def find_number(self, *names: str, above: float | None = None) -> float | None:
        """The same, or None where none of them has a value."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if not _is_number(value) or (above is not None and value <= above):
                bound = "" if above is None else f" above {above:g}"
                raise ConfigError("config.json", f"{name} is {_quote(value)}; it must be a number{bound}")
            return float(value)
        return None

    def numbers(self, name: str, *, count: int) -> list[float] | None:
        """A list of so many, or None where the key has no value."""
        found = self._list(name)
        if found is not None and (len(found) != count or not all(map(_is_number, found))):
            raise ConfigError("config.json", f"{name} is {_quote(found)}; it must be a list of {count} numbers")
        return None if found is None else [float(entry) for entry in found]

    def mapping(self, *names: str) -> ModelConfig:
        """The first of these that has something in it, which must be keys and values; an empty one where none has."""
        name = next((name for name in names if self.has(name)), None)
        value = {} if name is None else self._values[name]
        if not isinstance(value, Mapping):
            raise ConfigError("config.json", f"{name} is {_quote(value)}; it must be an object of keys and values")
        return ModelConfig(value)

    def count(self, *names: str, default: int = 0) -> int:
        """A whole number, 0 included."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return _whole_number(name, value, least=0)
        return default

    def texts(self, *names: str) -> list[str] | None:
        """The first of these that is a list with something in it, as strings."""
        found = self._list(*names)
        return None if found is None else [str(entry) for entry in found]

    def integers(self, *names: str) -> list[int] | None:
        """The same, as whole numbers."""
        found = self._list(*names)
        if found is None:
            return None
        if any(isinstance(entry, bool) or not isinstance(entry, int) for entry in found):
            raise ConfigError("config.json", f"{names[0]} is {_quote(found)}; it must be a list of whole numbers")
        return found

    def _list(self, *names: str) -> list[Any] | None:
        for name in names:
            value = self._values.get(name)
            if value is None or value == []:
                continue
            if not isinstance(value, list):
                raise ConfigError("config.json", f"{name} is {_quote(value)}; it must be a list")
            return value
        return None


def _is_shared(key: str, value: object) -> bool:
    """Whether what the document says of itself holds for its language model, too."""
    return not isinstance(value, Mapping) or key == "quantization_config"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole_number(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError("config.json", f"{name} is {_quote(value)}; it must be a whole number of at least {least}")
    most = MAX_COUNT if "layer" in name or "head" in name else MAX_SIZE
    if value > most:
        raise ConfigError("config.json", f"{name} is {_quote(value)}; no model has more than {most:,}")
    return value


def _quote(value: object) -> str:
    """A value as a message shows it, cut where it is long."""
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:40]}... ({len(words)} characters)"
