"""Render a document as one HTML file without scripts and network access.

The page is readable on a phone, in dark mode, and in print.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from oelm.printable import printable
from oelm.report.document import Document, inlines


def to_html(document: Document) -> str:
    return _ENVIRONMENT.get_template("report.html").render(document=document)


def _without_control_characters(value: Any) -> Any:
    return printable(value, lines=True) if type(value) is str else value


def _keep_units(text: str) -> str:
    """Return the text with non-breaking spaces between numbers and their units."""
    return text.replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0")


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    finalize=_without_control_characters,  # Jinja calls this before it escapes a value
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"words": _keep_units, "inlines": inlines}
