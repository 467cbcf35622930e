"""A document as data: one builder, and a renderer each for HTML, Markdown and the terminal.

Text is plain until a renderer escapes it, so nothing that a run's config says can become markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Tone = Literal["", "good", "bad", "open"]
SAFE_LINKS = ("#", "./", "../")  # within the page and to folders beside it: no text can bring its own scheme


@dataclass(frozen=True)
class Link:
    text: str
    href: str  # "#anchor" within the document, or a relative path
    strong: bool = False


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Strong:
    text: str


Inline: TypeAlias = str | Link | Code | Strong
Text: TypeAlias = str | tuple[Inline, ...]


def inlines(text: Text) -> tuple[Inline, ...]:
    return (text,) if isinstance(text, str) else text


def plain(text: Text) -> str:
    return "".join(part if isinstance(part, str) else part.text for part in inlines(text))


@dataclass(frozen=True)
class Paragraph:
    text: Text
    small: bool = False


@dataclass(frozen=True)
class Card:
    """One finding in plain words."""

    title: str
    lines: tuple[Text, ...]
    tone: Tone = ""
    badge: str = ""


@dataclass(frozen=True)
class Cards:
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Row:
    cells: tuple[Text, ...]
    tone: Tone = ""
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    words: int = 1  # so many leading columns hold words; the rest are numbers and align right
    verdict: int = -1  # the column that the rows' tone colours; none by default


@dataclass(frozen=True)
class Figure:
    name: str  # of a file, when it becomes one
    svg: str
    caption: str


@dataclass(frozen=True)
class Bullets:
    items: tuple[Text, ...]


@dataclass(frozen=True)
class Fold:
    """Detail that a reader opens when wanted."""

    title: str
    blocks: tuple[Block, ...]


Block: TypeAlias = Paragraph | Cards | Table | Figure | Bullets | Fold


@dataclass(frozen=True)
class Section:
    title: str
    anchor: str
    blocks: Sequence[Block] = field(default_factory=tuple)


@dataclass(frozen=True)
class Document:
    title: str
    lead: Text
    meta: tuple[Text, ...]
    sections: tuple[Section, ...]
    lang: str = "en"
