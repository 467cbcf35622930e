"""One table of everything the analysis says to people: key -> (English, Chinese)."""

from __future__ import annotations

from oelm.analysis.strings_messages import MESSAGES
from oelm.analysis.strings_report import REPORT
from oelm.errors import unknown_name

LANGUAGES = ("en", "zh")
TABLE: dict[str, tuple[str, str]] = {**MESSAGES, **REPORT}


def string(key: str, lang: str = "en", missing: str | None = None) -> str:
    """The text of a key; an unknown key is a bug and raises, unless the caller has something for it."""
    if lang not in LANGUAGES:
        raise unknown_name("language", lang, LANGUAGES)
    if missing is not None and key not in TABLE:
        return missing
    return TABLE[key][LANGUAGES.index(lang)]
