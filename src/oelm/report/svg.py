"""The style of the report's figures, and their conversion to SVG.

In the SVG, labels stay text, and axes take the text colour of the page. Arms (the compared methods) differ in
colour (Okabe and Ito's palette for colour-blind readers), marker and line style, so that they can be told
apart in a grey print too.
"""

from __future__ import annotations

import html
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

INK = "#010203"  # stands for the text colour of the page, which replaces it in the SVG
STANDALONE_INK = "#7a7f87"  # text colour in an SVG file without a page: readable on white and on black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D46", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 5)))
WIDTH = 7.2  # inches
LETTER, LINE = 0.09, 0.21  # width of a letter and height of a line in the legend, in inches

_STYLE: dict[Any, Any] = {  # Any, because matplotlib declares the allowed keys as literals
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in an arm's name does not start a formula
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


def plot_style() -> AbstractContextManager[None]:
    """Return the context manager with the report's style, in which all figures must be drawn."""
    return mpl.rc_context(_STYLE)


class ArmStyles:
    """The colour, marker and line style of each arm: unique, and equal in all figures that share them."""

    def __init__(self, arms: Sequence[str]) -> None:
        self.order = {name: i for i, name in enumerate(dict.fromkeys(arms))}

    def of(self, arm: str) -> dict[str, Any]:
        i = self.order.setdefault(arm, len(self.order))
        turn = i // len(COLOURS)  # after the last colour, markers and line styles shift against the colours
        return {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[(i + turn) % len(MARKERS)],
            "linestyle": DASHES[(i + 3 * turn) % len(DASHES)],
        }


def canvas(
    name: str, height: float, columns: int = 1, *, rows: int = 1, **options: Any
) -> tuple[Canvas, Any]:
    """Return a new figure and its axes. It does not use pyplot, which keeps global state."""
    figure = Canvas(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    figure.set_label(name)
    return figure, axes


def to_svg(figure: Canvas, title: str) -> str:
    """Return the figure as inline SVG, which scales with its container and takes the page's text colour."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": str(figure.get_label())}), warnings.catch_warnings():
        # matplotlib's font lacks Chinese glyphs. Labels stay text in the SVG, so the browser draws them.
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = printable(out.getvalue(), lines=True)  # XML allows no control characters
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    # Matplotlib's ids are unique only within a figure, but a page holds many figures.
    prefix = re.sub(r"[^a-z0-9]+", "-", str(figure.get_label()).lower())
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{prefix}-', svg)
    svg = svg.replace(INK, "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(printable(title))}"', 1).strip()


def standalone(svg: str) -> str:
    """Return the SVG as the content of a file, with a fixed colour instead of the page's text colour."""
    svg = svg.replace("currentColor", STANDALONE_INK).replace("<svg", '<svg font-family="sans-serif"', 1)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg}\n'


def legend_below(figure: Canvas, axes: Any) -> None:
    """Add a legend below the axes, with as many columns as fit, and enlarge the figure by its height."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max((len(label) for label in labels), default=0)
    columns = max(1, min(len(labels), int(WIDTH / (0.7 + LETTER * longest))))
    figure.set_size_inches(WIDTH, figure.get_size_inches()[1] + LINE * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, labelcolor=INK, frameon=False)
