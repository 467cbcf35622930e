"""One table of everything the analysis says to people: key -> (English, Chinese)."""

from __future__ import annotations

from oelm.analysis.strings_messages import MESSAGES
from oelm.analysis.strings_report import REPORT
from oelm.errors import unknown_name

LANGUAGES = ("en", "zh")
TABLE: dict[str, tuple[str, str]] = {**MESSAGES, **REPORT}


def string(key: str, lang: str = "en") -> str:
    """The text of a key; an unknown key is a bug and raises."""
    if lang not in LANGUAGES:
        raise unknown_name("language", lang, LANGUAGES)
    return TABLE[key][LANGUAGES.index(lang)]
