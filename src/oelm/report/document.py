"""The content of a report as data, which other modules render as HTML, as Markdown and in the terminal.

Texts hold no markup, and the renderers escape them, so a text from a run's config can never become markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

Tone = Literal["", "good", "bad", "open"]


@dataclass(frozen=True)
class Link:
    kind: ClassVar = "link"
    text: str
    href: str

    @property
    def safe(self) -> bool:
        """Whether the link leads to this page or a relative path, and not to a URL from a run's config."""
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
    """The findings on one dataset, in sentences. The badge is the verdict of the first sentence."""

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
    words: int = 1  # number of leading columns that hold words; the other columns hold numbers, aligned right
    verdict: int = -1  # index of the column that takes the colour of the row's tone; -1 for none


@dataclass(frozen=True)
class Figure:
    kind: ClassVar = "figure"
    name: str  # file name of the figure beside a Markdown report, without .svg
    svg: str
    caption: str


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


Block: TypeAlias = Paragraph | Cards | Table | Figure | Bullets | Fold


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
