"""Rules for the fields of a recorded document: an integer within limits, a flag, one of some words, a list of those.

A rule takes a field's name and its value and raises ValueError with what was wrong, the value and the limit. Knows
nothing of traces or planning cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Rule = Callable[[str, Any], None]

MAX_INT32 = 2**31 - 1
_SHOWN_CHARS = 60  # of a refused value
_NO_RULES: Mapping[str, Rule] = {}


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
    """Put the place in front of what a check inside says."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def shown(value: Any) -> str:
    """A value as JSON has it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write an integer of thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def integer(low: int, high: int) -> Rule:
    """An integer from low to high; true and 1.0 are none."""

    def check(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} is {shown(value)}; it must be an integer from {low} to {high}")

    return check


def fraction(name: str, value: Any) -> None:
    """A number from 0 up to, not including, 1."""
    if type(value) not in {int, float} or not 0 <= value < 1:
        raise ValueError(f"{name} is {shown(value)}; it must be a number from 0 to less than 1")


def number(name: str, value: Any) -> None:
    """Any number."""
    if type(value) not in {int, float}:
        raise ValueError(f"{name} is {shown(value)}; it must be a number")


def flag(name: str, value: Any) -> None:
    """True or false."""
    if type(value) is not bool:
        raise ValueError(f"{name} is {shown(value)}; it must be true or false")


def text(name: str, value: Any) -> None:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {shown(value)}; it must be a string that is not empty")


def anything(_name: str, _value: Any) -> None:
    """Every value."""


def one_of(words: Iterable[str]) -> Rule:
    """One of some words."""
    known = list(words)

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name} is {shown(value)}; known are {', '.join(known)}")

    return check


def null_or(rule: Rule) -> Rule:
    """Null, or what the rule allows."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            rule(name, value)

    return check


def list_of(rule: Rule, *, at_least: int = 0) -> Rule:
    """A list of what the rule allows."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) < at_least:
            minimum = f" of {at_least} or more" if at_least else ""
            raise ValueError(f"{name} is {shown(value)}; it must be a list{minimum}")
        for index, one in enumerate(value):
            rule(f"{name}[{index}]", one)

    return check


def exactly(rule: Rule, count: int) -> Rule:
    """A list of count such values."""
    each = list_of(rule)

    def check(name: str, value: Any) -> None:
        each(name, value)
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries; it must have {count}")

    return check


def check_fields(
    name: str, holder: Any, required: Mapping[str, Rule], optional: Mapping[str, Rule] = _NO_RULES
) -> None:
    """An object with all the required fields and none that is in neither."""
    if not isinstance(holder, dict):
        raise ValueError(f"{name} is {shown(holder)}; it must be an object")
    for key in required:
        if key not in holder:
            raise ValueError(f"{name} has no {key}; it must have {', '.join(required)}")
    for key, value in holder.items():
        rule = required.get(key) or optional.get(key)
        if rule is None:
            known = ", ".join([*required, *optional])
            raise ValueError(f"{name} has the unknown key {shown(key)}; known are {known}")
        rule(key, value)


def check_recording(document: Mapping[str, Any], kind: str) -> None:
    """What a file of traces and one of cases have in common: format 1, and a list that is not empty."""
    version = document.get("format", 1)
    if type(version) is not int or version != 1:
        raise ValueError(f"format is {shown(version)}; this version of blockferry reads format 1")
    list_of(anything, at_least=1)(kind, document.get(kind))


def name_of(kind: str, index: int, case: Any) -> str:
    """What to call a case in an error: by its id where it has one."""
    if not isinstance(case, dict):
        raise ValueError(f"{kind} {index} is {shown(case)}; it must be an object")
    with located(f"{kind} {index}"):
        text("id", case.get("id"))
    return f"{kind} {case['id']}"
