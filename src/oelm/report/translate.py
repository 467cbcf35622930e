"""Translate the report. English texts are in the source code, Chinese in locale/zh/LC_MESSAGES/oelm.po."""

from __future__ import annotations

import gettext
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oelm.analysis.messages import Message
from oelm.errors import unknown_name

LANGUAGES = ("en", "zh")
LOCALE = Path(__file__).parent / "locale"


class Translator:
    """A callable that returns an English text translated into one language.

    By gettext's convention, an instance is named `_`, so that `make translations` finds the texts.

    >>> _ = Translator("en")
    >>> _("{n} runs", n=3)
    '3 runs'
    """

    def __init__(self, lang: str = "en") -> None:
        if lang not in LANGUAGES:
            raise unknown_name("language", lang, LANGUAGES)
        self.lang = lang
        self._translations = gettext.translation("oelm", LOCALE, [lang], fallback=lang == "en")

    def __call__(self, text: str | Message, /, **values: Any) -> str:
        message = text if isinstance(text, Message) else Message(text, **values)
        return message.text(self._translations.gettext)

    def join(self, sentences: Sequence[str]) -> str:
        """Return the sentences as one paragraph; in Chinese there is no space between sentences."""
        return ("" if self.lang == "zh" else " ").join(sentences)
