"""Dataclasses to and from plain mappings, strictly: every name known, every value of its type.

The one reader for config.yaml and for `--set field=value`, so that both give the same errors.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from oelm.errors import UsageError, unknown_name

T = TypeVar("T")


def to_mapping(value: Any, *, deciding: bool = False) -> Any:
    """A dataclass as nested plain dicts and lists, in the order of its fields.

    `deciding` leaves out what a dataclass leaves out of its own equality (`compare=False`): descriptive
    text of a method may be reworded between versions without making its runs other runs.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.compare or not deciding]
        return {f.name: to_mapping(getattr(value, f.name), deciding=deciding) for f in fields}
    if isinstance(value, tuple | list):
        return [to_mapping(item, deciding=deciding) for item in value]
    return value


def from_mapping(cls: type[T], mapping: Any, where: str = "") -> T:
    """Build `cls` from a mapping; `where` names the place for the error message."""
    place = where or cls.__name__
    if not isinstance(mapping, Mapping):
        raise UsageError(f"{place}: expected a mapping of fields, got {_shown(mapping)}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    kind: Any = cls  # a class is hashable, whatever its type variable says
    hints = _hints(kind)
    values = {}
    for name, value in mapping.items():
        if name not in fields:
            raise unknown_name(f"field of {place}", str(name), fields)
        values[name] = convert(hints[name], value, f"{where}.{name}" if where else str(name))
    for name, f in fields.items():
        optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if name not in values and not optional:
            raise UsageError(f"{place}: the field '{name}' is missing")
    return cls(**values)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """Resolving annotations is most of the cost of reading a config; a thousand are read at once."""
    return typing.get_type_hints(cls)


def convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as an instance of the annotation `kind`, or an error that names the place.

    >>> convert(float, 1, "optim.lr"), convert(tuple[float, ...], [1, "3e-4"], "tune.grid")
    (1.0, (1.0, 0.0003))
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else from_mapping(kind, value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        if isinstance(value, str):
            raise unknown_name(f"value of {where}", value, [str(a) for a in arguments])
        raise UsageError(f"{where}: expected one of {', '.join(map(str, arguments))}, got {_shown(value)}")
    if origin is tuple or kind is tuple:
        return _convert_tuple(arguments, value, where)
    if kind is type(None):
        if value is None:
            return None
    elif kind is float:
        number = _as_float(value)
        if number is not None:
            return number
    elif kind in (bool, int, str) and type(value) is kind:
        return value
    raise UsageError(f"{where}: expected {_kind_name(kind)}, got {_shown(value)}")


def parse(kind: Any, text: str, where: str) -> Any:
    """A value of the annotation `kind` from the words of a command line (`--set optim.lr=1e-3`).

    >>> parse(bool, "yes", "compile"), parse(tuple[int, ...], "1,2", "tune.seeds"), parse(str, "007", "id")
    (True, (1, 2), '007')
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
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
    plain: Any = text
    if kind is bool and text.lower() in _TRUTH:
        plain = _TRUTH[text.lower()]
    elif kind is int:
        plain = int(text) if text.lstrip("+-").isdigit() else text
    elif kind is type(None) and text.lower() in ("none", "null"):
        plain = None
    return convert(kind, plain, where)


_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    errors = []
    # An exact type wins over a conversion, so that 1 stays an int in `int | float`.
    for option in sorted(options, key=lambda o: type(value) is not o):
        try:
            return convert(option, value, where)
        except UsageError as error:
            errors.append(error)
    raise errors[-1]


def _convert_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where}: expected a list, got {_shown(value)}")
    if not arguments:
        return tuple(value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise UsageError(f"{where}: expected {len(arguments)} values, got {len(value)}")
    return tuple(
        convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, value, strict=True))
    )


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):  # YAML reads 1e-4 (no dot) as text; people write it all the time
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _kind_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, str(kind).replace("typing.", ""))


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
