"""Escape untrusted text (file content, folder names, environment) before printing it on a terminal."""

from __future__ import annotations

import re

# Matches control characters (C0 and C1; ESC starts terminal commands), line and paragraph separators,
# characters that reorder or hide text (bidirectional controls, zero-width characters, the byte order mark),
# and lone surrogates, by which Python represents the bytes of a file name that is not UTF-8.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb]"
)
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return `text` with every character escaped that could control the terminal or hide text.

    `lines=True` keeps line breaks and tabs.

    >>> print(printable("GPT-01\x1b[2J\nfinished"))
    GPT-01\x1b[2J\nfinished
    """
    return (_UNSAFE_IN_LINES if lines else _UNSAFE).sub(_escaped, str(text))


def printable_json(text: str) -> str:
    r"""Return the JSON text `text` with control characters written as \u escapes, which keeps its value.

    >>> printable_json('"\x9b2J"') == '"' + chr(92) + 'u009b2J"'
    True
    """
    return _UNSAFE_IN_LINES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode("ascii")
