"""Read the rows of one file in bounded memory, and compute the SHA-256 of the file.

A row is a dict with the column names of the file; `clean_row()` converts them to the column names of oelm.
Rows that cannot be parsed are added to a `BadRows` and skipped.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from oelm.data.bad_rows import BadRows
from oelm.errors import OelmError
from oelm.files.atomic import write_json
from oelm.files.checksums import file_sha256

Row = dict[str, Any]

EXTENSIONS = (".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".raw", ".tokens")
TEXT_EXTENSIONS = (".txt", ".raw", ".tokens")
DOCUMENT_END = "<|endoftext|>"  # marks the end of a document in a text file
# The key of a row whose document continues in the next row. It is no text, so no column of a file has it.
CONTINUES: Any = ("continues",)
PIECE = 1 << 18  # maximum number of characters per piece; long texts are read and tokenized in pieces

_MAX_CSV_FIELD = 1 << 30
_MERGED_ROWS = 5  # lines of a cell that look like rows, from which on it is an error
_BLOCK = 1 << 20


def read_rows(
    path: Path, bad: BadRows, is_row: Callable[[Row], bool] | None = None
) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 1, row) for each row of a jsonl, csv, tsv, parquet or text file.

    If `is_row` is given, a cell of a csv file in which every line is a valid row is reported as a bad row.
    `is_row(row)` returns whether the label of a row is valid.
    """
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return _read_jsonl(path, bad)
    if kind == ".parquet":
        return _read_parquet(path)
    if kind in (".csv", ".tsv"):
        return _read_csv(path, bad, "\t" if kind == ".tsv" else ",", is_row)
    if kind in TEXT_EXTENSIONS:
        return _read_text(path, bad)
    raise OelmError(f"{path}: cannot read '{kind}' files; supported: {', '.join(EXTENSIONS)}")


def _read_jsonl(path: Path, bad: BadRows) -> Iterator[tuple[int, Row]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                bad.add("utf-8", str(path), number, "", f"byte {error.start} of the line is not UTF-8")
            except (ValueError, RecursionError) as error:
                bad.add("json", str(path), number, "", f"invalid JSON ({error})")
            else:
                if isinstance(row, dict):
                    yield number, row
                else:
                    bad.add("json", str(path), number, "", f"a {type(row).__name__}, not an object")


def _read_csv(
    path: Path, bad: BadRows, delimiter: str, is_row: Callable[[Row], bool] | None
) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(_MAX_CSV_FIELD)  # the default limit of 128 KB is too small for long documents
    with _open(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        number = 0
        while True:
            number += 1
            before = reader.reader.line_num
            try:
                if number == 1:
                    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
                    _check_no_column_twice(path, reader.fieldnames)
                    before = reader.reader.line_num
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                size = _lines(reader.reader.line_num - before)
                bad.add("csv", str(path), number, "", f"invalid CSV ({error}){size}")
                continue
            if None in row:
                bad.add("csv", str(path), number, "", "more cells than the header has columns")
                continue
            if any(cell and _holds_rows(cell, delimiter, list(row), is_row) for cell in row.values()):
                what = "a quotation mark opens a cell that ends lines later"
                bad.add("csv", str(path), number, "", what + _lines(reader.reader.line_num - before))
                continue
            broken = next((key for key, cell in row.items() if cell is not None and not is_utf8(cell)), None)
            if broken is not None:
                bad.add("utf-8", str(path), number, broken, "not UTF-8")
                continue
            yield number, row


def _lines(count: int) -> str:
    return f"; this row has {count:,} lines of the file" if count > 1 else ""


def _holds_rows(
    cell: str, delimiter: str, columns: Sequence[str], is_row: Callable[[Row], bool] | None
) -> bool:
    """Return whether a cell with several lines consists of rows that a stray quotation mark has merged.

    Most .tsv files have no quoted cells, so one tab in such a cell is enough. In other files, all lines
    between the first and the last must be rows, and there must be at least _MERGED_ROWS of them.
    """
    if "\n" not in cell or len(columns) < 2:
        return False
    if delimiter == "\t":
        return delimiter in cell
    inner = cell.split("\n")[1:-1]
    if is_row is None or len(inner) < _MERGED_ROWS:
        return False
    try:
        return all(
            len(cells) == len(columns) and is_row(dict(zip(columns, cells, strict=True)))
            for cells in csv.reader(inner, delimiter=delimiter, strict=True)
            if cells  # an empty line is no row
        )
    except csv.Error:
        return False


def _check_no_column_twice(path: Path, names: Sequence[str]) -> None:
    """Raise OelmError if two columns have one name, because only the last of them would be read."""
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise OelmError(f"{path} has two columns with the name {twice[0]!r}: rename one of them")


def is_utf8(text: str) -> bool:
    """Return whether `text` is valid UTF-8: a lone surrogate, which marks an invalid byte, is not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False, memory_map=True) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise OelmError(
            f"{path}: the parquet file cannot be read after row {number} ({error}); copy the file again"
        ) from error


def _read_text(path: Path, bad: BadRows) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) for the documents of a text file.

    A long document becomes several rows; all of them except the last have the key CONTINUES.
    """
    with _open(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")  # \r\n becomes \n
        blocks = iter(lambda: lines.read(_BLOCK), "")
        for number, (text, is_end) in enumerate(_documents(blocks), start=1):
            if is_utf8(text):
                yield number, {"text": text} if is_end else {"text": text, CONTINUES: True}
            else:
                bad.add("utf-8", str(path), number, "text", f"not UTF-8; the text starts with {text[:40]!r}")


def _documents(blocks: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Yield (text, is_end) from consecutive blocks; if `is_end` is False, the next text continues it."""
    rest, continued = "", False  # continued: whether `rest` continues a document
    for block in blocks:
        *complete, rest = (rest + block).split(DOCUMENT_END)
        for document in complete:
            if document.strip() or continued:
                yield (document if continued else document.lstrip("\n")).rstrip("\n"), True
            continued = False
        while len(rest) > 2 * PIECE:
            end = _piece_end(rest, 0)
            yield rest[:end] if continued else rest[:end].lstrip("\n"), False
            rest, continued = rest[end:], True
    if rest.strip() or continued:
        yield rest, True


_BEFORE_SPACE = re.compile(r"\S(?=\s)")


def _piece_end(text: str, start: int) -> int:
    """Return the end position of the piece of `text` that begins at `start`, at most `start + PIECE`.

    All supported tokenizers split between a word and the white space after it. A piece ends at such a place,
    so that the cut does not change any token. Text without white space is cut after PIECE characters.
    """
    limit = start + PIECE
    for begin in (max(start, limit - 1024), start):
        ends = [match.end() for match in _BEFORE_SPACE.finditer(text, begin, limit + 1)]
        if ends:
            return ends[-1]
    return limit


def pieces(text: str) -> Iterator[str]:
    """Yield pieces of at most PIECE characters, which are tokenized into the same tokens as all of `text`."""
    start = 0
    while len(text) - start > PIECE:
        end = _piece_end(text, start)
        yield text[start:end]
        start = end
    yield text[start:]


_ARTICLE_TITLE = re.compile(r"^ = [^=].* = \s*$")


def join_articles(rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """Yield (number of the first line, {"text": article}) from the lines of an official WikiText file."""
    first, article = 1, [""]
    for number, row in rows:
        line = str(row.get("text") or "\n")
        if _ARTICLE_TITLE.match(line) and any(map(str.strip, article)):
            yield first, {"text": "".join(article)}
            first, article = number, []
        article.append(line if line.endswith("\n") else line + "\n")
    if any(map(str.strip, article)):
        yield first, {"text": "".join(article)}


def read_lines(path: Path, bad: BadRows) -> Iterator[tuple[int, Row]]:
    """Yield (line number, {"text": line}) for each line of a text file; add invalid lines to `bad`."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, {"text": line.decode("utf-8")}
            except UnicodeDecodeError as error:
                bad.add("utf-8", str(path), number, "text", f"byte {error.start} is not UTF-8")


def _open(path: Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise OelmError(f"cannot read {path}: {error.strerror}") from error


def cached_sha256(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file, computed again only if the file has changed since the last call.

    The folder `cache` stores the result together with the size and the modification time of the file.
    """
    status = path.stat()
    name = str(path.resolve())
    now = {"path": name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    entry = cache / "fingerprints" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(entry.read_text(encoding="utf-8"))
        if {key: known.get(key) for key in now} == now:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, AttributeError):
        pass  # the cache has no valid entry for this file
    digest = file_sha256(path)
    with contextlib.suppress(OSError):  # if the cache is read-only, the file is hashed again next time
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_json(entry, {**now, "sha256": digest})
    return digest
