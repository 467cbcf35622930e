"""Update and compile the report's translations (`make translations`).

Run it after a change of a sentence, translate the new sentences in oelm.po, then run it again.
"""

from __future__ import annotations

from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

SOURCE = Path(__file__).parents[1] / "src" / "oelm"
ROOMS = ("analysis", "experiments", "report")
METHODS = [("**.py", "python"), ("**/templates/*.html", "jinja2")]
CHINESE = SOURCE / "report" / "locale" / "zh" / "LC_MESSAGES" / "oelm.po"


def english() -> list[str]:
    """The texts of source and templates that are marked for translation: in `_("…")` and `Message("…")`."""
    keywords = {"_": None, "Message": None}
    found = (extract_from_dir(SOURCE / room, METHODS, keywords=keywords) for room in ROOMS)
    return list(dict.fromkeys(message for texts in found for _file, _line, message, *_rest in texts))


def main() -> None:
    with CHINESE.open("rb") as file:
        catalog = read_po(file, locale="zh")
    marked = Catalog()
    for text in english():
        marked.add(text)
    catalog.update(marked, no_fuzzy_matching=True, update_creation_date=False)
    catalog.obsolete.clear()
    with CHINESE.open("wb") as file:
        write_po(file, catalog, width=0, sort_output=True)
    with CHINESE.with_suffix(".mo").open("wb") as file:
        write_mo(file, catalog)
    for message in catalog:
        if message.id and not message.string:
            print(f"not translated: {message.id}")


if __name__ == "__main__":
    main()
