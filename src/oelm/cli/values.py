"""Parse the values of options: lists such as `0 1 2`, `0,1,2` or `0-3`, and durations such as `90s` or `12h`.

The functions whose names end in `_option` are cyclopts converters. A converter gets all words that follow its
option, even if the option is given more than once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number

from oelm.errors import UsageError, require_distinct

if TYPE_CHECKING:
    from cyclopts import Token

_T = TypeVar("_T")
_RANGE = re.compile(r"(\d+)-(\d+)")
MAX_RANGE = 10_000  # a range with more values, such as 0-99999, is a typing mistake


def integers(words: Iterable[str], flag: str) -> tuple[int, ...]:
    """Return the integers that words such as "3", "1,2" and "0-4" name; one that is named twice is an error.

    flag: name of the option, for error messages

    >>> integers(["0-2", "7,9"], "--seeds")
    (0, 1, 2, 7, 9)
    """
    found: list[int] = []
    for part in _split_commas(words):
        if part.isascii() and part.isdecimal():
            found.append(int(part))
        elif _RANGE.fullmatch(part):
            found.extend(_expand_range(part, flag))
        else:
            raise UsageError(
                f"{flag} takes integers that are 0 or more, such as 0 1 2, 0,1,2 or 0-3, not '{part}'"
            )
    if not found:
        raise UsageError(f"{flag} needs at least one integer, such as 0 1 2 or 0-3")
    return _distinct(found, flag)


def seconds(text: str) -> float:
    """Return a duration in seconds; `text` is `90`, `90s`, `45m`, `12h`, `2d`, `HH:MM:SS` or `D-HH:MM:SS`.

    >>> seconds("1h"), seconds("00:01:30"), seconds("1-00:00:00")
    (3600.0, 90.0, 86400.0)
    """
    try:
        found = _parse_seconds(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise UsageError(f"'{text}' is not a duration; write 90s, 45m, 12h, 2d or HH:MM:SS")
    return found


def _parse_seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if ":" in text:
        days, _, clock = text.rpartition("-")
        total = 0.0
        for part in clock.split(":"):
            total = total * 60 + float(part)
        return total + 86400 * int(days or 0)
    if text[-1:] in units:
        return float(text[:-1]) * units[text[-1]]
    return float(text)


def _split_commas(words: Iterable[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _expand_range(part: str, flag: str) -> range:
    first, last = (int(number) for number in part.split("-"))
    if last < first:
        raise UsageError(f"{flag}: the range {part} is reversed; write {last}-{first}")
    if last - first >= MAX_RANGE:
        raise UsageError(f"{flag}: the range {part} has more than {MAX_RANGE:,} values; write a shorter one")
    return range(first, last + 1)


def _distinct(values: Sequence[_T], flag: str) -> tuple[_T, ...]:
    try:
        require_distinct(values)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None
    return tuple(values)


def _integers_option(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    return integers([token.value for token in tokens], str(tokens[0].keyword))


def _numbers_option(_: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    flag = str(tokens[0].keyword)
    try:
        numbers = [float(part) for part in _split_commas(token.value for token in tokens)]
    except ValueError as error:
        raise UsageError(f"{flag} takes numbers such as 1e-3 3e-3: {error}") from None
    return _distinct(numbers, flag)


def _phases_option(_: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    found: list[str] = []
    for part in _split_commas(token.value for token in tokens):
        is_range = _RANGE.fullmatch(part)
        found.extend(map(str, _expand_range(part, str(tokens[0].keyword))) if is_range else [part])
    if not found:
        raise UsageError(f"{tokens[0].keyword} needs at least one phase, such as 1, 1-4 or paper")
    return tuple(dict.fromkeys(found))  # `1-4 2` selects what `1-4` does


def _seconds_option(_: Any, tokens: Sequence[Token]) -> float:
    return seconds(tokens[0].value)


def _integer_option(_: Any, tokens: Sequence[Token]) -> int:
    """Return the value of an option as an integer; 1.5 is an error (cyclopts would round it)."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise UsageError(f"{tokens[0].keyword} takes an integer, not '{tokens[0].value}'") from None


SEVERAL = Parameter(consume_multiple=(1, None))  # accepts `--flag a b c` as well as `--flag a --flag b`
Integer = Annotated[int, Parameter(converter=_integer_option, n_tokens=1)]
Count = Annotated[Integer, Parameter(validator=Number(gte=0))]
PositiveCount = Annotated[Integer, Parameter(validator=Number(gte=1))]
Integers = Annotated[tuple[int, ...], SEVERAL, Parameter(converter=_integers_option, n_tokens=-1)]
Numbers = Annotated[tuple[float, ...], SEVERAL, Parameter(converter=_numbers_option, n_tokens=-1)]
PhaseNames = Annotated[tuple[str, ...], SEVERAL, Parameter(converter=_phases_option, n_tokens=-1)]
Names = Annotated[tuple[str, ...], SEVERAL]
Seconds = Annotated[float, Parameter(converter=_seconds_option, n_tokens=1)]
