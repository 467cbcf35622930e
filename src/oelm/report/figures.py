"""Figures as SVG text: the same runs give the same bytes, words stay words, axes take the page's colour.

Arms are told apart by colour (Okabe and Ito's palette, safe for colour-blind readers), by marker and by line
style, so a grey print still reads.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from oelm.printable import printable

INK = "#010203"  # stands for the text colour of the page it will lie on
STANDALONE_INK = "#7a7f87"  # readable on white and on black, for an SVG file of its own
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D46", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 5)))
WIDTH = 7.2
LETTER, LINE = 0.09, 0.21  # inches that a letter and a line of the legend take

_STYLE: dict[Any, Any] = {  # matplotlib types its keys as a list of literals
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in an arm's name is a dollar
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "axes.axisbelow": True,
}


def house_style() -> AbstractContextManager[None]:
    """Around everything that draws: matplotlib reads its settings whenever it makes a new piece."""
    return mpl.rc_context(_STYLE)


class Look:
    """How each arm looks: the same in all figures that share a look, and unlike any other's."""

    def __init__(self, arms: Sequence[str]) -> None:
        self.order = {name: i for i, name in enumerate(dict.fromkeys(arms))}

    def of(self, arm: str) -> dict[str, Any]:
        i = self.order.setdefault(arm, len(self.order))
        turn = i // len(COLOURS)  # past the last colour, markers and dashes shift against the colours
        return {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[(i + turn) % len(MARKERS)],
            "linestyle": DASHES[(i + 3 * turn) % len(DASHES)],
        }


def canvas(
    name: str, height: float, columns: int = 1, *, rows: int = 1, **options: Any
) -> tuple[Canvas, Any]:
    """A figure outside pyplot: no display, no global state."""
    figure = Canvas(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    figure.set_label(name)
    return figure, axes


def to_svg(figure: Canvas, title: str) -> str:
    """Inline SVG that scales with its container and takes its text colour from the page."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": str(figure.get_label())}), warnings.catch_warnings():
        # Chinese labels are text in the SVG; the browser has the glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = printable(out.getvalue(), lines=True)  # XML allows no control characters
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    # Ids are unique within one figure only; a page holds many.
    prefix = re.sub(r"[^a-z0-9]+", "-", str(figure.get_label()).lower())
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{prefix}-', svg)
    svg = svg.replace(INK, "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{_attribute(title)}"', 1).strip()


def standalone(svg: str) -> str:
    """The same as a file of its own, where there is no page to take a colour from."""
    svg = svg.replace("currentColor", STANDALONE_INK)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        + svg.replace("<svg", '<svg font-family="sans-serif"', 1)
        + "\n"
    )


def legend_below(figure: Canvas, axes: Any) -> None:
    """As many columns as the longest label leaves room for; the figure grows by what the legend takes."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max((len(label) for label in labels), default=0)
    columns = max(1, min(len(labels), int(WIDTH / (0.7 + LETTER * longest))))
    figure.set_size_inches(WIDTH, figure.get_size_inches()[1] + LINE * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, labelcolor=INK, frameon=False)


def _attribute(text: str) -> str:
    text = printable(text)
    for plain, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(plain, safe)
    return text
