"""The content of a report as data, which other modules render as HTML, as Markdown and in the terminal.

Texts contain no markup, and the renderers escape them, so a text from a run's config cannot become markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    from oelm.report.board.forest import ForestRow

Tone = Literal["", "good", "bad", "open"]


@dataclass(frozen=True)
class Link:
    kind: ClassVar = "link"
    text: str
    href: str

    @property
    def safe(self) -> bool:
        """Whether the link leads to this page or a relative path. (A run's config could contain any URL.)"""
        return self.href.startswith(("#", "./", "../"))


@dataclass(frozen=True)
class Code:
    kind: ClassVar = "code"
    text: str


@dataclass(frozen=True)
class Strong:
    kind: ClassVar = "strong"
    text: str


Inline: TypeAlias = str | Link | Code | Strong
Text: TypeAlias = str | tuple[Inline, ...]


def inlines(text: Text) -> tuple[Inline, ...]:
    return (text,) if isinstance(text, str) else text


def plain(text: Text) -> str:
    return "".join(part if isinstance(part, str) else part.text for part in inlines(text))


@dataclass(frozen=True)
class Paragraph:
    kind: ClassVar = "paragraph"
    text: Text
    small: bool = False


@dataclass(frozen=True)
class Card:
    """A box with the findings on one dataset in sentences; `badge` is the verdict of the first sentence."""

    title: str
    lines: tuple[Text, ...]
    tone: Tone = ""
    badge: str = ""


@dataclass(frozen=True)
class Cards:
    kind: ClassVar = "cards"
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Row:
    cells: tuple[Text, ...]
    tone: Tone = ""
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    kind: ClassVar = "table"
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    words: int = 1  # the first `words` columns contain words; the others contain numbers, aligned right
    verdict: int = -1  # index of the column that is coloured by the row's tone; -1 for none


@dataclass(frozen=True)
class Figure:
    """A drawing of the Markdown report; the HTML report has charts and forest plots instead."""

    kind: ClassVar = "figure"
    name: str  # file name without .svg
    svg: str
    caption: str


@dataclass(frozen=True)
class ForestPlot:
    """A table with one question per row: the verdict, the change, and its confidence interval as a bar."""

    kind: ClassVar = "forest"
    rows: tuple[tuple[ForestRow, str, str], ...]  # (row, dataset, anchor of the arm's runs)
    ticks: tuple[tuple[float, str], ...]  # (position on the axis in per cent, label)
    caption: str
    head: tuple[str, ...]


@dataclass(frozen=True)
class Chart:
    """Curves of several arms, drawn by charts.js. `data` is the result of `board.curves.chart()`."""

    kind: ClassVar = "chart"
    data: dict[str, Any]


@dataclass(frozen=True)
class Charts:
    """Charts side by side, with a heading."""

    kind: ClassVar = "charts"
    title: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Bullets:
    kind: ClassVar = "bullets"
    lines: tuple[Text, ...]


@dataclass(frozen=True)
class Fold:
    """Details that are hidden until the reader opens them."""

    kind: ClassVar = "fold"
    title: str
    blocks: tuple[Block, ...]


Block: TypeAlias = Paragraph | Cards | Table | Figure | ForestPlot | Charts | Bullets | Fold


@dataclass(frozen=True)
class Section:
    title: str
    anchor: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    title: str
    headline: Text
    about: tuple[Text, ...]
    sections: tuple[Section, ...]
    lang: str = "en"

    @property
    def figures(self) -> list[Figure]:
        return [b for section in self.sections for b in section.blocks if isinstance(b, Figure)]
