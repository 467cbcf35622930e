"""Lists on the command line: `0 1 2`, `0,1,2`, `0-3`, mixtures of them, and the flag given more than once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from oelm.errors import UsageError

_RANGE = re.compile(r"(\d+)-(\d+)")
MAX_RANGE = 10_000  # numbers of one range: more is a slip of the finger


class ListAction(argparse.Action):
    """Collect the words of every use of a flag; a default is replaced, not extended. Each value once."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        before = getattr(namespace, self.dest)
        before = [] if before is self.default else list(before)
        setattr(namespace, self.dest, list(dict.fromkeys([*before, *self.parse(values, str(option))])))

    def parse(self, words: Sequence[str], flag: str) -> list[Any]:
        return list(words)


class WholeNumbers(ListAction):
    """Seeds."""

    def parse(self, words: Sequence[str], flag: str) -> list[Any]:
        return whole_numbers(words, flag)


class Numbers(ListAction):
    """Learning rates."""

    def parse(self, words: Sequence[str], flag: str) -> list[Any]:
        try:
            return [float(part) for part in split_commas(words)]
        except ValueError as error:
            raise UsageError(f"{flag} takes numbers such as 1e-3 3e-3: {error}") from None


class Labels(ListAction):
    """Phases: numbers, ranges of numbers, and names."""

    def parse(self, words: Sequence[str], flag: str) -> list[Any]:
        parts = split_commas(words)
        return [x for part in parts for x in (_range(part, flag) if _RANGE.fullmatch(part) else [part])]


def split_commas(words: Sequence[str]) -> list[str]:
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def whole_numbers(words: Sequence[str], flag: str) -> list[int]:
    """
    >>> whole_numbers(["0-2", "7,9"], "--seeds")
    [0, 1, 2, 7, 9]
    """
    found: list[int] = []
    for part in split_commas(words):
        if part.isascii() and part.isdecimal():
            found.append(int(part))
        elif _RANGE.fullmatch(part):
            found.extend(map(int, _range(part, flag)))
        else:
            raise UsageError(
                f"{flag} takes whole numbers from 0 on, such as 0 1 2, 0,1,2 or 0-3, not '{part}'"
            )
    if not found:
        raise UsageError(f"{flag} needs at least one number, such as 0 1 2 or 0-3")
    return found


def _range(part: str, flag: str) -> list[str]:
    first, last = (int(number) for number in part.split("-"))
    if last < first:
        raise UsageError(f"{flag}: the range {part} runs backwards; write {last}-{first}")
    if last - first >= MAX_RANGE:
        raise UsageError(f"{flag}: the range {part} holds {last - first + 1:,} numbers")
    return [str(number) for number in range(first, last + 1)]
