"""Maps that came over a network, made into dataclasses by their annotations: every field checked, nothing believed.

Owns the rules of what may stand for which type. Knows no message and no encoding. A class's reader is composed once, at
first use.

    int, float, str, bytes, bool   themselves; an int of 64 bits, which may stand for a float too
    Enum                           its value
    Any                            anything
    dataclass                      a map with its fields' names; those with a default may be missing
    NamedTuple, tuple, list, dict  lists and maps of what is in them
    NDArray                        an array of its dtype, with one axis or as many as the field's metadata `num_axes`
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

Reader = Callable[[Any], Any]
T = TypeVar("T")

TWO_AXES: Mapping[str, int] = types.MappingProxyType({"num_axes": 2})


def read(kind: type[T], value: Any) -> T:
    """The value as one of `kind`. Raises ValueError, naming what does not fit."""
    annotation: Any = kind
    made: T = _reader(annotation)(value)
    return made


@functools.cache
def _reader(kind: Any) -> Reader:
    """What turns a plain value into one of an annotation."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _optional(kind)
    if origin is not None:
        return _READERS_OF[origin](kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    return functools.partial(_enum, kind) if issubclass(kind, enum.Enum) else _named_tuple(kind)


def _integer(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{_shown(value)} is not an integer of 64 bits")
    return value


def _number(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"{_shown(value)} is not a number")
    return float(value)


def _exactly(kind: type) -> Reader:
    def read_one(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"{_shown(value)} is not of type {kind.__name__}")
        return value

    return read_one


def _enum(kind: type[enum.Enum], value: Any) -> enum.Enum:
    if type(value) is not str:
        raise ValueError(f"{_shown(value)} is not a {kind.__name__}")
    return kind(value)


def _optional(kind: Any) -> Reader:
    (some,) = (one for one in typing.get_args(kind) if one is not type(None))
    read_some = _reader(some)
    return lambda value: None if value is None else read_some(value)


def _items(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{_shown(value)} is not a list")
    return value


def _list(kind: Any) -> Reader:
    read_one = _reader(typing.get_args(kind)[0])
    return lambda value: [read_one(one) for one in _items(value)]


def _tuple(kind: Any) -> Reader:
    """Of one type and any length: no message has others."""
    read_one, _ = (_reader(one) if one is not ... else None for one in typing.get_args(kind))
    assert read_one is not None, kind
    return lambda value: tuple([read_one(one) for one in _items(value)])


def _named_tuple(kind: Any) -> Reader:
    readers = [_reader(one) for one in typing.get_type_hints(kind).values()]

    def read_tuple(value: Any) -> Any:
        if len(_items(value)) != len(readers):
            raise ValueError(f"{len(value)} values are no {kind.__name__}, which has {len(readers)}")
        return kind(*(read_one(one) for read_one, one in zip(readers, value, strict=True)))

    return read_tuple


def _mapping(kind: Any) -> Reader:
    read_key, read_value = (_reader(one) for one in typing.get_args(kind))
    return lambda value: {read_key(key): read_value(one) for key, one in _map(value).items()}


def _map(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{_shown(value)} is not a map")
    return value


def _array(kind: Any, num_axes: int = 1) -> Reader:
    dtype = np.dtype(typing.get_args(typing.get_args(kind)[1])[0])

    def read_array(value: Any) -> Any:
        if type(value) is not np.ndarray or value.dtype != dtype or value.ndim != num_axes:
            raise ValueError(f"{_shown(value)} is not an array of {dtype} with {num_axes} axes")
        return value

    return read_array


def _dataclass(kind: Any) -> Reader:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    readers = {field.name: _field_reader(hints[field.name], field.metadata) for field in fields}

    def read_fields(value: Any) -> Any:
        found = {}
        for name, one in _map(value).items():
            if name not in readers:
                raise ValueError(f"{kind.__name__} has no field {_shown(name)}")
            try:
                found[name] = readers[name](one)
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        try:
            return kind(**found)
        except TypeError as error:
            raise ValueError(f"{kind.__name__} with fields missing: {error}") from None

    return read_fields


def _field_reader(hint: Any, metadata: Mapping[str, Any]) -> Reader:
    return _array(hint, metadata["num_axes"]) if "num_axes" in metadata else _reader(hint)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_PLAIN: Mapping[Any, Reader] = {
    int: _integer,
    float: _number,
    str: _exactly(str),
    bytes: _exactly(bytes),
    bool: _exactly(bool),
    Any: lambda value: value,
}
_READERS_OF: Mapping[Any, Callable[[Any], Reader]] = {
    list: _list,
    tuple: _tuple,
    dict: _mapping,
    Mapping: _mapping,
    np.ndarray: _array,
}
