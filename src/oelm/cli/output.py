"""Print tables and wrapped text for people, and JSON for programs."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from oelm.errors import UsageError
from oelm.printable import printable, printable_json

_KEEP_WORDS: Any = {"break_on_hyphens": False, "break_long_words": False}


def print(text: object = "", **options: Any) -> None:
    """Print `text` with control characters escaped, so that text from a file cannot control the terminal."""
    builtins.print(printable(text, lines=True), **options)


def discard_output() -> None:
    """Send all further output for stdout, and what is still buffered, nowhere.

    After the reader of a pipe has gone, Python would otherwise fail again when it exits.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    builtins.print(printable_json(json.dumps(value, indent=2, ensure_ascii=False, default=str)))


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]], indent: str = "") -> None:
    """Print rows as aligned columns; columns of numbers are right-aligned."""
    cells = [["" if cell is None else printable(cell) for cell in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(header)]
    right = [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(header))]
    for row in [list(header), *cells]:
        line = "  ".join(
            text.rjust(width) if flush_right else text.ljust(width)
            for text, width, flush_right in zip(row, widths, right, strict=True)
        )
        print(f"{indent}{line}".rstrip())


def print_text(text: str, indent: str = "", hang: str = "") -> None:
    """Print text wrapped to the width of the terminal, at most 110 columns.

    The first line starts with `indent`. Later lines start with as many spaces, followed by `hang`.
    """
    width = min(110, shutil.get_terminal_size((110, 24)).columns)
    unbroken = text.replace(" %", "\N{NO-BREAK SPACE}%")
    later = " " * len(indent) + hang
    for line in textwrap.wrap(unbroken, width, initial_indent=indent, subsequent_indent=later, **_KEEP_WORDS):
        print(line.replace("\N{NO-BREAK SPACE}", " "))


def output_file(text: str) -> Path:
    """Return the path of an output file; raise UsageError if it is a folder, or inside of a file.

    Commands call this before they start, so that they do not fail after hours of work.
    """
    path = Path(text)
    if path.is_dir():
        raise UsageError(f"cannot write to {path}, because it is a directory; name a file")
    if parent := next((p for p in path.parents if p.is_file()), None):
        raise UsageError(f"cannot write to {path}, because {parent} is a file; name another folder")
    return path


def _numeric(text: str) -> bool:
    return not text or text == "-" or text.replace(",", "").replace(".", "", 1).lstrip("-+").isdigit()
