"""One table of everything the analysis says to people: key -> (English, Chinese)."""

from __future__ import annotations

from oelm.errors import unknown_name
from oelm.report.strings_messages import MESSAGES
from oelm.report.strings_report import REPORT

LANGUAGES = ("en", "zh")
TABLE: dict[str, tuple[str, str]] = {**MESSAGES, **REPORT}


def string(key: str, lang: str = "en") -> str:
    """The text of a key; an unknown key is a bug and raises."""
    if lang not in LANGUAGES:
        raise unknown_name("language", lang, LANGUAGES)
    return TABLE[key][LANGUAGES.index(lang)]
