"""`Message`: a sentence as an English template with named values, which is translated when it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, init=False)
class Message:
    """A sentence as an English template and the values of its placeholders.

    The template must be a string literal in the source code, because tools/translations.py extracts the
    sentences to translate from there, and because a printed sentence can then be found with grep.

    >>> print(Message("{n} runs diverged: {runs}", n=2, runs=("GPT-01", "GPT-02")))
    2 runs diverged: GPT-01, GPT-02
    """

    template: str
    values: tuple[tuple[str, Any], ...]

    def __init__(self, template: str, /, **values: Any) -> None:
        object.__setattr__(self, "template", template)
        object.__setattr__(self, "values", tuple(values.items()))

    def text(self, translate: Callable[[str], str] = str) -> str:
        """Return the sentence in the language of `translate`, a function from a template to its translation.

        A value may be a `Message` itself. A tuple is shown as a list separated by commas.
        """
        shown = {name: _shown(value, translate) for name, value in self.values}
        return translate(self.template).format(**shown)

    def __str__(self) -> str:
        return self.text()


STATES = {
    "finished": Message("finished"),
    "running": Message("running"),
    "interrupted": Message("interrupted"),
    "diverged": Message("diverged"),
    "failed": Message("failed"),
    "oom": Message("out of memory"),
    "broken": Message("unreadable"),
    "pending": Message("not started"),
    "dead": Message("dead"),
    "stalled": Message("stalled"),
    "queued": Message("queued"),
}


def state_name(state: str) -> Message:
    """Return the state of a run in words for display; an unknown state is shown unchanged."""
    return STATES.get(state) or Message("{state}", state=state)


def _shown(value: Any, translate: Callable[[str], str]) -> Any:
    if isinstance(value, Message):
        return value.text(translate)
    if isinstance(value, tuple):
        return Message(", ").text(translate).join(str(_shown(v, translate)) for v in value)
    return value
