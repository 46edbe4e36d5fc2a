"""Typed reading of a YAML mapping: every value checked, every unknown key refused by its dotted path.

Knows YAML and types, nothing of deployments. Never fills in a value that the caller did not name as default.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from blockferry.engine.errors import ConfigError

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice in one mapping, which YAML would silently override."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> Any:
    """Parse a YAML file. Raises ConfigError for a file that cannot be read or is no YAML, with the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("", f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("", f"cannot read {path}: {error}") from None
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError("", f"{path}, line {line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError("", f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def parse_size(path: str, value: object) -> int:
    """Bytes of 4096, "512MiB" or "2 GB". Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(path, f"{value!r} is not a size; write bytes or a unit, such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


class Section:
    """One mapping of the file, read key by key; finish() then refuses whatever was not asked for."""

    def __init__(self, path: str, value: object) -> None:
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(path or "file", f"must be a mapping of keys to values, not {_kind(value)}")
        self.path = path
        self._values = {str(key): entry for key, entry in value.items()}
        self._known: set[str] = set()

    def at(self, key: str) -> str:
        """Dotted path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the key is written with a value."""
        return self._values.get(key) is not None

    def written_keys(self) -> list[str]:
        """Every key as written."""
        return list(self._values)

    def _take(self, key: str) -> object:
        self._known.add(key)
        return self._values.get(key)

    def text(self, key: str, default: str | None) -> str | None:
        """A string; None when absent and no default."""
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value.strip():
            if isinstance(value, str):
                raise ConfigError(self.at(key), "must not be empty; write a value, or remove the key")
            remedy = "; put it in quotes" if isinstance(value, bool | int | float) else ""  # YAML reads off as false
            raise ConfigError(self.at(key), f"must be text, not {_kind(value)}{remedy}")
        return value

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """One of `choices`."""
        value = self._take(key)
        if value is None:
            return default
        if value not in choices:
            hint = difflib.get_close_matches(str(value).lower(), choices, n=1)
            guess = f" (did you mean {str(hint[0])!r}?)" if hint else ""
            raise ConfigError(self.at(key), f"{value!r} is not one of {', '.join(choices)}{guess}")
        return str(value)

    def integer(self, key: str, default: int, *, minimum: int, maximum: int | None = None) -> int:
        """A whole number within limits."""
        value = self._take(key)
        if value is None:
            return default
        limit = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(self.at(key), f"must be a whole number {limit}, not {_kind(value)}")
        if value < minimum or (maximum is not None and value > maximum):
            raise ConfigError(self.at(key), f"{value} is out of range; it must be {limit}")
        return value

    def number(self, key: str, default: float, *, minimum: float, maximum: float = math.inf) -> float:
        """A finite number within limits."""
        value = self._take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(self.at(key), f"must be a number, not {_kind(value)}")
        if not minimum <= value <= maximum:
            limit = f"at least {minimum:g}" if math.isinf(maximum) else f"between {minimum:g} and {maximum:g}"
            raise ConfigError(self.at(key), f"{value:g} is out of range; it must be {limit}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(self.at(key), f"must be true or false, not {_kind(value)}")
        return value

    def size(self, key: str, default: int) -> int:
        """A positive number of bytes."""
        value = self._take(key)
        if value is None:
            return default
        num_bytes = parse_size(self.at(key), value)
        if num_bytes <= 0:
            raise ConfigError(self.at(key), f"{value} leaves no memory; write a positive size such as 1GiB")
        return num_bytes

    def section(self, key: str) -> Section:
        """A nested mapping; empty when absent."""
        return Section(self.at(key), self._take(key))

    def sections(self, key: str) -> list[Section]:
        """A list of mappings; empty when absent."""
        value = self._take(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigError(self.at(key), f"must be a list (lines that begin with '- '), not {_kind(value)}")
        return [Section(f"{self.at(key)}[{index}]", entry) for index, entry in enumerate(value)]

    def finish(self) -> None:
        """Raises ConfigError for the first key that nobody asked for."""
        for key in self._values:
            if key not in self._known:
                hint = difflib.get_close_matches(key, sorted(self._known), n=1)
                remedy = f"did you mean {hint[0]!r}?" if hint else f"known keys: {', '.join(sorted(self._known))}"
                raise ConfigError(self.at(key), f"unknown key; {remedy}")


def _kind(value: object) -> str:
    """A value as a person would call it."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"{type(value).__name__} {value!r}"
