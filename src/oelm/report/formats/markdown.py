"""Render a document as Markdown; its figures are separate SVG files."""

from __future__ import annotations

import re
from urllib.parse import quote

from oelm.printable import printable
from oelm.report.document import (
    Block,
    Bullets,
    Card,
    Cards,
    Code,
    Document,
    Figure,
    Fold,
    Inline,
    Link,
    Paragraph,
    Strong,
    Table,
    Text,
    inlines,
)
from oelm.report.translate import Translator


def to_markdown(document: Document, figures: str = "") -> str:
    """Return the document as Markdown.

    figures: folder of the SVG files, relative to the Markdown file
    """
    _ = Translator(document.lang)
    parts = [
        f"# {_escape(document.title)}",
        f"**{_text(document.headline)}**",
        *(_text(m) for m in document.about),
    ]
    for section in document.sections:
        parts.append(f'<a id="{section.anchor}"></a>\n\n## {_escape(section.title)}')
        parts.extend(_block(b, figures, _) for b in section.blocks)
    return "\n\n".join(p for p in parts if p) + "\n"


def _block(block: Block, figures: str, _: Translator) -> str:
    match block:
        case Paragraph():
            return _text(block.text)
        case Cards():
            return "\n\n".join(_card(card, _) for card in block.cards)
        case Table():
            return _table(block)
        case Figure():
            caption = _escape(block.caption)
            return f"![{caption}]({quote(figures)}/{block.name}.svg)\n\n*{caption}*"
        case Bullets():
            return "\n".join(f"- {_text(i)}" for i in block.lines)
        case Fold():
            return "\n\n".join(
                [f"**{_escape(block.title)}**", *(_block(b, figures, _) for b in block.blocks)]
            )
        case _:
            return ""  # only the HTML report has charts


def _card(card: Card, _: Translator) -> str:
    title = _("{name}: {text}", name=card.title, text=card.badge)
    return f"### {_escape(title)}\n\n" + "\n".join(f"- {_text(line)}" for line in card.lines)


def _table(table: Table) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = ["---" if i < table.words else "---:" for i in range(len(table.head))]
    rows = []
    for row in table.rows:
        cells = [_text(c) for c in row.cells]
        if row.anchor:
            cells[0] = f'<a id="{row.anchor}"></a>{cells[0]}'
        rows.append(line(cells))
    caption = [f"**{_escape(table.caption)}**\n"] if table.caption else []
    return "\n".join([*caption, line([_escape(h) for h in table.head]), line(rule), *rows])


def _text(text: Text) -> str:
    return "".join(_inline(part) for part in inlines(text))


def _inline(part: Inline) -> str:
    match part:
        case Link():
            if not part.safe:
                return _escape(part.text)
            return f"[{_escape(part.text)}]({quote(part.href, safe='#/=%')})"
        case Code():
            if re.fullmatch(r"[^`<>&|\n]+", part.text):
                return f"`{printable(part.text)}`"
            return f"<code>{_escape(part.text)}</code>"  # in backticks, `|` and backticks cannot be escaped
        case Strong():
            return f"**{_escape(part.text)}**"
        case _:
            return _escape(part)


def _escape(text: str) -> str:
    """Return the text with HTML, Markdown, table separators and line breaks escaped."""
    text = printable(text, lines=True)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
    return re.sub(r"([\\`*_\[\]|#!])", r"\\\1", text)
