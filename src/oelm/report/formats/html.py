"""Render a document as one HTML file that loads no other file and is readable on a phone and in print.

The only script of the page draws the charts. The page's security policy contains the hash of this script, so
browsers run no other script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from oelm.printable import printable
from oelm.report.document import Document, inlines

_REPORT = Path(__file__).parents[1]
_STATIC = _REPORT / "board" / "static"
_DRAW = """
for (const figure of document.querySelectorAll("figure.chart"))
  oelmChart(figure, JSON.parse(figure.querySelector("script").textContent));
"""


def to_html(document: Document) -> str:
    script = "\n".join([*(_static(name) for name in ("uPlot.iife.min.js", "charts.js")), _DRAW])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _ENVIRONMENT.get_template("report.html").render(
        document=document,
        script=Markup(script),
        digest=digest,
        chart_style=Markup(_static("uPlot.min.css") + _static("charts.css")),
    )


def _static(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _data(value: Any) -> Markup:
    """Return a value as JSON for an HTML script element; `<` is escaped, so that no text ends the element."""
    return Markup(json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def _keep_units(text: str) -> str:
    """Return the text with non-breaking spaces between numbers and their units."""
    return text.replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0")


def template_environment(*folders: Path) -> Environment:
    """Return a Jinja environment for HTML templates that escapes every value."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        # Jinja calls this before it escapes a value.
        finalize=lambda value: printable(value, lines=True) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


_ENVIRONMENT = template_environment(_REPORT / "templates", _STATIC.parent / "templates")
_ENVIRONMENT.filters |= {"words": _keep_units, "inlines": inlines, "data": _data}
