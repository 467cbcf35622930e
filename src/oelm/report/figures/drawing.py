"""The style of the figures that matplotlib draws for the Markdown report and for papers.

Arms (the compared methods) differ in colour (Okabe and Ito's palette for colour-blind readers), marker and
line style, so that they can also be distinguished in a grey print.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from oelm.files.atomic import atomic_open
from oelm.printable import printable

INK = "#7a7f87"  # readable on white and on black: a Markdown page may have either
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D46", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 5)))


@dataclass(frozen=True)
class Style:
    """Where a figure will be shown: its width in inches, its font size in points, font and text colour."""

    width: float
    size: float
    font: str
    ink: str


PAGE = Style(7.2, 10, "sans-serif", INK)
PAPER = Style(3.4, 8, "STIXGeneral", "black")  # one column of a two-column paper, set in Times


def plot_style(style: Style = PAGE) -> AbstractContextManager[None]:
    """Return a context manager that sets the style; figures must be drawn inside its `with` block."""
    settings: dict[Any, Any] = {  # Any, because matplotlib declares the allowed keys as literals
        "svg.fonttype": "none",  # write labels as text instead of paths
        "pdf.fonttype": 42,  # TrueType; many publishers do not accept the default, Type 3 fonts
        "text.parse_math": False,  # a "$" in an arm's name must not start a formula
        "font.size": style.size,
        "font.family": style.font,
        "figure.figsize": (style.width, style.width / 2),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": style.size,
        "grid.alpha": 0.15,
        "legend.frameon": False,
        "legend.handlelength": 3.0,  # long enough for a whole pattern of dashes
        "legend.columnspacing": 0.8,
        "axes.axisbelow": True,
        "lines.linewidth": 1.5,
    }
    inked = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color")
    return mpl.rc_context(settings | dict.fromkeys((*inked, "ytick.color", "grid.color"), style.ink))


class ArmStyles:
    """Gives each arm its own colour, marker and line style, the same in all figures that use this object."""

    def __init__(self, arms: Sequence[str]) -> None:
        self.order = {name: i for i, name in enumerate(dict.fromkeys(arms))}

    def of(self, arm: str) -> dict[str, Any]:
        i = self.order.setdefault(arm, len(self.order))
        turn = i // len(COLOURS)  # arms with the same colour get different markers and line styles
        return {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[(i + turn) % len(MARKERS)],
            "linestyle": DASHES[(i + 3 * turn) % len(DASHES)],
        }


@dataclass(frozen=True)
class Drawing:
    """A figure that has been drawn, with the name of its file and its caption."""

    name: str
    canvas: Canvas
    caption: str

    def svg(self) -> str:
        """Return the figure as the content of an SVG file that scales with its container."""
        out = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": self.name}):
            _save(self.canvas, out, "svg", metadata={"Date": None, "Creator": None})
        svg = printable(out.getvalue(), lines=True)  # XML allows no control characters
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
        for size in ("width", "height"):
            svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
        label = (
            f'<svg role="img" font-family="sans-serif" aria-label="{html.escape(printable(self.caption))}"'
        )
        return f'<?xml version="1.0" encoding="utf-8"?>\n{svg.replace("<svg", label, 1).strip()}\n'

    def save(self, folder: Path) -> list[Path]:
        """Write the figure as PDF and as PNG; return the paths."""
        paths = [folder / f"{self.name}.pdf", folder / f"{self.name}.png"]
        for path in paths:
            kind = path.suffix[1:]
            with atomic_open(path) as file:
                _save(self.canvas, file, kind, metadata={"CreationDate": None} if kind == "pdf" else None)
        return paths


def _save(canvas: Canvas, file: Any, kind: str, **options: Any) -> None:
    with warnings.catch_warnings():
        # Matplotlib warns that its fonts lack Chinese glyphs, but in an SVG, the browser draws the labels.
        warnings.filterwarnings("ignore", message=".*Glyph .* missing from")
        canvas.savefig(file, format=kind, transparent=kind == "svg", dpi=300, **options)


def new_canvas(height: float, columns: int = 1, **options: Any) -> tuple[Canvas, Any]:
    """Return a new figure, `height` inches high, and its axes; pyplot, with its global state, is not used."""
    canvas = Canvas(figsize=(mpl.rcParams["figure.figsize"][0], height), layout="constrained")
    return canvas, canvas.subplots(1, columns, **options)


def legend_below(canvas: Canvas, axes: Any) -> None:
    """Add a legend below the axes, with as many columns as fit, and make the figure higher to hold it."""
    handles, labels = axes.get_legend_handles_labels()
    width, height = canvas.get_size_inches()
    letter = mpl.rcParams["font.size"] / 72  # height of the font in inches
    font = FontProperties()  # the font of the style
    longest = max((TextPath((0, 0), text, prop=font).get_extents().width for text in labels), default=0) / 72
    handle = letter * (3.0 + 0.8 + 0.8)  # the line, its distance from the name, and the space between columns
    columns = max(1, min(len(labels), int((width + 0.8 * letter) / (handle + longest))))
    line = 1.5 * letter
    canvas.set_size_inches(width, height + line * math.ceil(len(labels) / columns))
    canvas.legend(handles, labels, loc="outside lower center", ncols=columns)
