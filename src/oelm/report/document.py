"""A document as data, with a renderer each for HTML, Markdown and the terminal.

Texts are plain until a renderer escapes them, so nothing from a run's config can become markup.
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
        """Whether it leads to this page or a relative path, so that no text can bring its own scheme."""
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
    """The findings on one dataset in sentences; the badge is the verdict of the first."""

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
    words: int = 1  # number of leading columns with words; the others are numbers and align right
    verdict: int = -1  # index of the column that takes the colour of the row's tone; -1 for none


@dataclass(frozen=True)
class Figure:
    kind: ClassVar = "figure"
    name: str  # name of its file in a Markdown report
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
