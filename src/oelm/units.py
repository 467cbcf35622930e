"""Quantities in words, for every room."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """
    >>> bytes_text(514 * 2**20)
    '514.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
