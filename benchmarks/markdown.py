"""Markdown tables of the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table.

    >>> table(("a", "b"), [("1", "2")])
    ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    """
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
