"""Translation of the report: English is in the source, Chinese in locale/zh/LC_MESSAGES/oelm.po."""

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
    """A function that returns a text in one language.

    By gettext's convention it is named `_`, so that `make translations` finds the texts to translate.

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
        """Sentences as one paragraph; Chinese has no space between them."""
        return ("" if self.lang == "zh" else " ").join(sentences)
