"""What the analysis says, kept apart from the language it is said in.

A warning, a flag or a verdict is a key of the strings table and its values; the words are chosen when it
is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oelm.report.strings import TABLE, string


@dataclass(frozen=True)
class Message:
    key: str
    values: tuple[tuple[str, Any], ...] = ()

    def text(self, lang: str = "en") -> str:
        """In words; a value that is itself a message (or several) is said in the same language."""
        shown = {name: _say(value, lang) for name, value in self.values}
        return string(self.key, lang).format(**shown)

    def __str__(self) -> str:
        return self.text()


def say(key: str, **values: Any) -> Message:
    return Message(key, tuple(values.items()))


def state_name(state: str) -> Message | str:
    """A state of a run in words; one that another version wrote stays as it is."""
    key = f"state.{state}"
    return say(key) if key in TABLE else state


def _say(value: Any, lang: str) -> Any:
    if isinstance(value, Message):
        return value.text(lang)
    if isinstance(value, tuple):
        return string("list.separator", lang).join(str(_say(v, lang)) for v in value)
    return value
