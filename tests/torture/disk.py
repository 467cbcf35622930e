"""File operations that fail because the disk is full, over quota or broken, or no file can be opened.

The command must stop with a message, or go on if the operation was not essential. The same command must then
finish the run with the same bytes as an undisturbed run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from .arena import Arena
from .driver import Case, oelm, sample
from .faults import FileFaults

ERRORS = ("ENOSPC", "ENOSPC+", "EDQUOT", "EIO", "ENFILE")  # "+": every later operation fails, too
_NO_ROOM = ("open", "write", "fsync", "mkdir", "replace", "rename", "link")
_FAILS = {"ENOSPC": _NO_ROOM, "EDQUOT": _NO_ROOM, "EIO": (*_NO_ROOM, "truncate"), "ENFILE": ("open",)}


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield `count` cases per error, spread over the file operations of the run.

    With count=0, each error happens once at every operation at which it is possible.
    """
    for shape in ("cls",) if count else ("cls", "fresh"):
        operations = arena.operations("cls", shape == "fresh")
        for error in ERRORS:
            possible = _FAILS[error.rstrip("+")]
            numbers = [n for n, text in enumerate(operations, 1) if text.split()[0] in possible]
            names = [f"{shape}:{error}:{number}" for number in numbers]
            for name in sample(arena.rng("disk", shape, error), names, count):
                yield case(arena, name)


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name: SHAPE:ERROR:NUMBER, with the number of the file operation that fails.

    The shape "fresh" is "cls" with an empty token cache.
    """
    shape, error, number = name.split(":")
    return Case("disk", name, lambda place: _failed_write(arena, shape, error, int(number), place))


def _failed_write(arena: Arena, shape: str, error: str, number: int, place: Path) -> str:
    cache = place / "cache" if shape == "fresh" else None
    runs, faults = place / "runs", FileFaults([place / "runs", place / "cache"], number, error)
    ending = oelm(arena.train("cls", runs, cache=cache), place / "log", faults.install)
    ending.must_be_clean()
    arena.must_not_seem_alive("cls", runs)
    if ending.code == 0:
        arena.must_be_equal("cls", runs)
        how = "went on in spite of the error, then equal"
    else:
        ending.must_fail(os.strerror(getattr(errno, error.rstrip("+"))), "full", "space")
        how = "stopped with a message, then equal"
    arena.must_end_equal("cls", runs, place / "log", cache)
    return how
