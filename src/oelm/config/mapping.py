"""Convert dataclasses to and from plain mappings. Every value is checked against the type of its field.

The same code reads config.yaml, the JSON files of a run and `--set field=value`, so all give the same errors.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from oelm.errors import UsageError, unknown_name

T = TypeVar("T")
_PLAIN = (bool, int, float, str)


def to_mapping(value: Any, *, compared_only: bool = False) -> Any:
    """Return a dataclass as nested dicts and lists, in the order of its fields.

    `compared_only` leaves out fields with `compare=False`, such as a method's description: rewording it
    must not change the hash of a config.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.compare or not compared_only]
        found = {f.name: to_mapping(getattr(value, f.name), compared_only=compared_only) for f in fields}
        # 0 in a field of type float is written as 0.0, as it is read again: both must give the same hash.
        floats = [f.name for f in fields if f.type == "float" and type(found[f.name]) is int]
        return found | {name: float(found[name]) for name in floats}
    if isinstance(value, tuple | list):
        return [to_mapping(item, compared_only=compared_only) for item in value]
    return value


def from_mapping(cls: type[T], mapping: Any, where: str = "", *, json: bool = False) -> T:
    """Return an instance of the dataclass `cls` with the values of a mapping {field name: value}.

    An unknown field raises a UsageError that suggests the nearest valid name. Error messages start with
    `where`, the dotted name of the mapping, such as "optim". `json=True` is for files that oelm itself wrote:
    unknown fields are ignored, and text is never converted to a number.
    """
    start, of_place = (f"{where}: ", f" of {where}") if where else ("", "")
    if not isinstance(mapping, Mapping):
        raise UsageError(f"{start}expected a mapping of fields, got {_shown(mapping)}", field=where)
    dataclass: Any = cls  # typed Any, because mypy does not accept type[T] for a cached function
    hints = field_types(dataclass)
    values = {}
    for name, value in mapping.items():
        kind = hints.get(name)
        if type(value) is kind and kind in _PLAIN:  # most values; `convert()` would return the same
            values[name] = value
            continue
        field_place = f"{where}.{name}" if where else str(name)
        if kind is not None:
            values[name] = convert(kind, value, field_place, json=json)
        elif not json:
            raise unknown_name(f"field{of_place}", str(name), hints, field=field_place)
    if missing := [name for name in _required_fields(dataclass) if name not in values]:
        raise UsageError(f"{start}the field '{missing[0]}' is missing", field=where)
    try:
        return cls(**values)
    except UsageError as error:  # raised by __post_init__() of the dataclass
        error.field = error.field or where
        raise


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Return {field name: type} of the fields of a dataclass that its constructor takes."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


@functools.cache
def _required_fields(cls: Any) -> list[str]:
    """Return the names of the fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    fields = [f for f in dataclasses.fields(cls) if f.init]
    return [f.name for f in fields if f.default is missing and f.default_factory is missing]


def convert(kind: Any, value: Any, where: str, *, json: bool = False) -> Any:
    """Return `value` converted to the type annotation `kind`; raise UsageError if that is not possible.

    The error message starts with `where`, the dotted name of the field.

    >>> convert(float, 1, "optim.lr"), convert(tuple[float, ...], [1, "3e-4"], "tune.grid")
    (1.0, (1.0, 0.0003))
    """
    if kind is Any or (type(value) is kind and kind in _PLAIN):
        return value
    origin, arguments = _origin_and_arguments(kind)
    inner = functools.partial(convert, json=json)
    if origin is None and isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if isinstance(value, kind):
            return value
        return from_mapping(kind, value, where, json=json)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where, inner)
    if origin is Literal:
        return _convert_literal(arguments, value, where)
    if origin is tuple:
        return _convert_tuple(arguments, value, where, inner)
    if origin is dict and isinstance(value, Mapping):
        if arguments == (str, Any) and all(type(name) is str for name in value):
            return dict(value)
        return {
            inner(arguments[0], name, where): inner(arguments[1], item, f"{where}.{name}")
            for name, item in value.items()
        }
    if kind is float and type(value) in (int, float):
        return float(value)
    # YAML reads 1e-4 (no dot), 0300 and yes as text, so such text is accepted, except from JSON.
    if kind in (bool, int, float) and not json and type(found := _plain_value(kind, value)) is kind:
        return found
    if kind is type(None) and value is None:
        return None
    raise UsageError(
        f"{where}: expected {_kind_name(kind)}, got {_shown(value)}{_advice(kind, value)}", field=where
    )


@functools.cache
def _origin_and_arguments(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return, for example, (tuple, (int, ...)) for the type annotation tuple[int, ...]."""
    return typing.get_origin(kind), typing.get_args(kind)


def parse(kind: Any, text: str, where: str) -> Any:
    """Return the command-line value `text`, such as the "1e-3" of `--set optim.lr=1e-3`, as the type `kind`.

    `where` is the dotted name of the field, for the error message.

    >>> parse(bool, "yes", "compile"), parse(tuple[int, ...], "1,2", "tune.seeds"), parse(str, "007", "id")
    (True, (1, 2), '007')
    """
    origin, arguments = _origin_and_arguments(kind)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return parse(option, text, where)
            except UsageError:
                continue
        raise UsageError(f"{where}: expected {_kind_name(kind)}, got {_shown(text)}")
    if origin is tuple:
        parts = [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
        return tuple(parse(arguments[0], part, where) for part in parts)
    return convert(kind, _plain_value(kind, text), where)


_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _plain_value(kind: Any, text: Any) -> Any:
    """Return the bool, number or None that is written as `text`, or `text` itself if it is none of these."""
    if not isinstance(text, str):
        return text
    if kind is bool:
        return _TRUTH.get(text.lower(), text)
    if kind is int:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,99}", text) else text
    if kind is float:
        try:
            return float(text)
        except ValueError:
            return text
    return None if kind is type(None) and text.lower() in ("none", "null") else text


def _convert_union(options: tuple[Any, ...], value: Any, where: str, inner: Any) -> Any:
    # An option that is exactly the type of the value comes first, so that 1 stays an int in `float | int`.
    if type(value) in options and type(value) in (*_PLAIN, type(None)):
        return value
    errors = []
    for option in options:
        try:
            return inner(option, value, where)
        except UsageError as error:
            if option is not type(None):
                errors.append(error)
    if len(errors) > 1 and isinstance(value, _PLAIN):
        kinds = " or ".join(_kind_name(option) for option in options if option is not type(None))
        raise UsageError(f"{where}: expected {kinds}, got {_shown(value)}", field=where)
    raise errors[-1]


def _convert_literal(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    if isinstance(value, str):
        raise unknown_name(f"value of {where}", value, [str(choice) for choice in choices], field=where)
    listed = ", ".join(map(str, choices))
    raise UsageError(f"{where}: expected one of {listed}, got {_shown(value)}", field=where)


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str, inner: Any) -> tuple[Any, ...]:
    """Return the list `value` as a tuple of converted items; `arguments` is (X, ...) for tuple[X, ...]."""
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where}: expected a list, got {_shown(value)}", field=where)
    kind = arguments[0]
    if kind in (int, float, str) and all(type(item) is kind for item in value):
        return tuple(value)  # fast path without conversions: predictions.json may have millions of integers
    return tuple(inner(kind, item, f"{where}[{i}]") for i, item in enumerate(value))


def _kind_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    origin, arguments = _origin_and_arguments(kind)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_kind_name, arguments))
    if origin is tuple:
        return "a list"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping of fields"
    return names.get(kind, str(kind).replace("typing.", ""))


def _advice(kind: Any, value: Any) -> str:
    """Return how to write a number in place of `1_000` or `12:30`, or a text in place of 7; "" if unknown."""
    if kind is str and type(value) in (bool, int, float):
        return "; write it in quotes"
    if kind in (int, float) and isinstance(value, str) and re.match(r"[+-]?[0-9]", value):
        return f"; write it in decimal digits, such as {1000 if kind is int else 0.5}"
    return ""


def _shown(value: Any) -> str:
    return f"{value!r:.200} ({type(value).__name__})"
