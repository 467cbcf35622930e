"""Format byte counts and durations as text. Every message, table and report uses these functions."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """Return a byte count with a binary unit.

    >>> bytes_text(512), bytes_text(1536), bytes_text(514 * 2**20)
    ('512 B', '1.5 KiB', '514 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def counted(n: int, singular: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "run"), counted(3, "run")
    ('1 run', '3 runs')
    """
    return f"{n} {singular}" if n == 1 else f"{n} {singular}s"


def duration_text(seconds: float | None) -> str:
    """Return a duration in its two largest units, or "-" if it is unknown.

    >>> duration_text(3.2), duration_text(75), duration_text(18_400), duration_text(200_000)
    ('3.2 s', '1 min 15 s', '5 h 07 min', '2 d 07 h')
    """
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"
