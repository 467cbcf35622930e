"""A document as one HTML file: no network, no script, light and dark, phone and paper. Escaping is here."""

from __future__ import annotations

import html

from oelm.printable import printable
from oelm.report.document import (
    SAFE_LINKS,
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
    Row,
    Section,
    Strong,
    Table,
    Text,
    inlines,
)
from oelm.report.style import CSS

# Nothing may be loaded from anywhere; inline styles and SVG are all the page needs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def to_html(document: Document) -> str:
    meta = "".join(f"<p>{_text(line)}</p>" for line in document.meta)
    contents = "".join(
        f'<li><a href="#{escape(s.anchor)}">{escape(s.title)}</a></li>' for s in document.sections
    )
    lang = "zh-CN" if document.lang == "zh" else "en"
    title = escape(document.title)
    head = (
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>{CSS}</style>\n'
    )
    lead = f'<p class="lead">{_text(document.lead)}</p>'
    top = f'<header><h1>{title}</h1>{lead}<div class="meta">{meta}</div></header>'
    body = "".join(_section(s) for s in document.sections)
    return (
        f'<!doctype html>\n<html lang="{lang}">\n<head>\n{head}</head>\n<body>\n{top}\n'
        f"<nav><ol>{contents}</ol></nav>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """For HTML; control characters and bidirectional overrides are shown escaped."""
    return html.escape(printable(text, lines=True))


def _section(section: Section) -> str:
    inner = "".join(_block(b) for b in section.blocks)
    return f'<section id="{escape(section.anchor)}"><h2>{escape(section.title)}</h2>\n{inner}</section>\n'


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            return f"<p{' class=small' if block.small else ''}>{_text(block.text)}</p>\n"
        case Cards():
            return f'<div class="cards">{"".join(_card(c) for c in block.cards)}</div>\n'
        case Table():
            return _table(block)
        case Figure():
            # The SVG is our own drawing: matplotlib escapes its words, and `figures.to_svg` its title.
            return f"<figure>{block.svg}<figcaption>{escape(block.caption)}</figcaption></figure>\n"
        case Bullets():
            return f"<ul>{''.join(f'<li>{_text(i)}</li>' for i in block.items)}</ul>\n"
        case Fold():
            inner = "".join(_block(b) for b in block.blocks)
            return f"<details><summary>{escape(block.title)}</summary>{inner}</details>\n"


def _card(card: Card) -> str:
    badge = f'<span class="badge">{escape(card.badge)}</span>' if card.badge else ""
    lines = "".join(f"<p>{_text(line)}</p>" for line in card.lines)
    return f'<article class="card {card.tone}"><h3>{escape(card.title)} {badge}</h3>{lines}</article>'


def _table(table: Table) -> str:
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    head = "".join(f'<th scope="col"{_side(i, table)}>{escape(h)}</th>' for i, h in enumerate(table.head))
    rows = "".join(_row(r, table) for r in table.rows)
    inner = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inner}</div>\n'


def _row(row: Row, table: Table) -> str:
    name = f' id="{escape(row.anchor)}"' if row.anchor else ""
    cells = "".join(f"<td{_side(i, table)}>{_text(c)}</td>" for i, c in enumerate(row.cells))
    return f'<tr{name} class="{row.tone}">{cells}</tr>'


def _side(column: int, table: Table) -> str:
    if column == table.verdict:
        return ' class="verdict"'
    return "" if column < table.words else ' class="num"'


def _text(text: Text) -> str:
    return "".join(_inline(part) for part in inlines(text))


def _words(text: str) -> str:
    """Escaped, and no line ends between a number and its unit."""
    return escape(text.replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0"))


def _inline(part: Inline) -> str:
    match part:
        case Link():
            # Only links within the page and to folders beside it: no config can bring its own scheme.
            if not part.href.startswith(SAFE_LINKS):
                return _words(part.text)
            return f'<a href="{escape(part.href)}">{_words(part.text)}</a>'
        case Code():
            return f"<code>{escape(part.text)}</code>"
        case Strong():
            return f"<strong>{_words(part.text)}</strong>"
        case _:
            return _words(part)
