"""Rows of one file, in bounded memory, and what identifies the file's content.

A row is a dict as the file has it; `clean` makes it one of ours. A bad row goes into a `Problems` and is
left out; what to do about it is the caller's choice.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oelm.data.catalogue import Dataset
from oelm.data.problems import Problems
from oelm.errors import OelmError
from oelm.files.atomic import write_json

Row = dict[str, Any]

EXTENSIONS = (".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".raw", ".tokens")
TEXT_EXTENSIONS = (".txt", ".raw", ".tokens")
DOCUMENT_END = "<|endoftext|>"  # in a text file, this ends a document; without it the file is one document
PIECE = 1 << 18  # characters; longer documents travel in pieces

_LONGEST_CSV_FIELD = 1 << 30
_BLOCK = 1 << 20


def read_rows(path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    """(row number from 1, row) of a jsonl, csv, tsv, parquet or text file."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return _read_jsonl(path, problems)
    if kind == ".parquet":
        return _read_parquet(path)
    if kind in (".csv", ".tsv"):
        return _read_csv(path, problems, "\t" if kind == ".tsv" else ",")
    if kind in TEXT_EXTENSIONS:
        return _read_text(path, problems)
    raise OelmError(f"{path}: cannot read '{kind}' files; these work: {', '.join(EXTENSIONS)}")


def _read_jsonl(path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                problems.add("utf-8", str(path), number, "", f"byte {error.start} of the line is not UTF-8")
                continue
            except (ValueError, RecursionError) as error:
                problems.add("json", str(path), number, "", f"broken JSON ({error})")
                continue
            if isinstance(row, dict):
                yield number, row
            else:
                problems.add("json", str(path), number, "", f"a {type(row).__name__}, not an object")


def _read_csv(path: Path, problems: Problems, delimiter: str) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(_LONGEST_CSV_FIELD)  # the default refuses documents over 128 KB
    with _open(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        number = 0
        while True:
            number += 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                problems.add("csv", str(path), number, "", f"broken CSV ({error})")
                continue
            if None in row:
                problems.add("csv", str(path), number, "", "more cells than the header has columns")
                continue
            broken = next((key for key, cell in row.items() if cell is not None and not _is_utf8(cell)), None)
            if broken is not None:
                problems.add("utf-8", str(path), number, broken, "not UTF-8")
                continue
            yield number, row


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # an escaped byte of a broken sequence
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
        raise OelmError(f"{path}: not a readable parquet file after row {number} ({error})") from error


def _read_text(path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    """Documents of a text file; a long one comes as several rows, all but the last marked `continues`."""
    with _open(path) as file:
        blocks = codecs.iterdecode(iter(lambda: file.read(_BLOCK), b""), "utf-8", errors="surrogateescape")
        for number, (text, ends) in enumerate(_documents(blocks), start=1):
            if _is_utf8(text):
                yield number, {"text": text} if ends else {"text": text, "continues": True}
            else:
                problems.add("utf-8", str(path), number, "text", f"not UTF-8, after {text[:40]!r}")


def _documents(blocks: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """(text, document ends here) of a stream of text blocks."""
    held = ""
    for block in blocks:
        held += block
        *whole, held = held.split(DOCUMENT_END)
        for document in whole:
            if document.strip():
                yield document.strip("\n"), True
        while len(held) > 2 * PIECE:
            end = _cut(held, 0)
            yield held[:end], False
            held = held[end:]
    if held.strip():
        yield held, True


_BEFORE_SPACE = re.compile(r"\S(?=\s)")


def _cut(text: str, start: int) -> int:
    """Where to end a piece of at most PIECE characters from `start`, so that the text's tokens do not notice.

    Every tokenizer here splits between a word and the white space behind it, so tokens of the parts are the
    tokens of the whole. Text without any white space for PIECE characters is cut as it comes.
    """
    limit = start + PIECE
    for begin in (max(start, limit - 1024), start):
        ends = [match.end() for match in _BEFORE_SPACE.finditer(text, begin, limit + 1)]
        if ends:
            return ends[-1]
    return limit


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most PIECE characters whose tokens are those of the whole."""
    start = 0
    while len(text) - start > PIECE:
        end = _cut(text, start)
        yield text[start:end]
        start = end
    yield text[start:]


def _open(path: Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise OelmError(f"cannot read {path}: {error.strerror}") from error


def clean(dataset: Dataset, raw: Row, file: str, number: int, problems: Problems) -> Row | None:
    """The row with our field names, texts checked and the label a class number; None if it is bad."""
    row: Row = {}
    for name in dataset.columns:
        key = next((key for key in (name, *dataset.aliases.get(name, ())) if key in raw), None)
        if key is None:
            there = ", ".join(str(key) for key in raw) or "nothing"
            problems.add("field", file, number, name, f"missing; the row has: {there}")
            return None
        row[name] = raw[key]
    for name in dataset.fields:
        kind, what = _wrong_text(row[name])
        if kind:
            if not (dataset.drops_empty and kind == "empty"):
                problems.add(kind, file, number, name, what)
            return None
    if dataset.label_names:
        label = _class_number(row["label"], dataset.label_names)
        if label is None:
            last = len(dataset.label_names) - 1
            what = f"is {row['label']!r}, not one of 0..{last} ({', '.join(dataset.label_names)})"
            problems.add("label", file, number, "label", what)
            return None
        row["label"] = label
    if raw.get("continues"):
        row["continues"] = True
    return row


def _wrong_text(value: Any) -> tuple[str, str]:
    """(kind, what is wrong), both empty when nothing is."""
    if value is None or (isinstance(value, str) and (not value or value.isspace())):
        return "empty", "empty"
    if not isinstance(value, str):
        return "field", f"a {type(value).__name__}, not text"
    return ("", "") if _is_utf8(value) else ("utf-8", "half of a surrogate pair, which is no text")


def _class_number(value: Any, names: tuple[str, ...]) -> int | None:
    if isinstance(value, str):
        folded = value.strip().casefold()
        by_name = {name.casefold(): number for number, name in enumerate(names)}
        if folded in by_name:
            return by_name[folded]
        value = int(folded) if folded.isdecimal() else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return (
        int(value) if 0 <= value < len(names) and value == int(value) else None
    )  # 1.0 is what pandas writes


_ARTICLE = re.compile(r"^ = [^=].* = \s*$")


def articles(rows: Iterator[tuple[int, Row]], field: str) -> Iterator[tuple[int, Row]]:
    """Join rows that are lines (the official WikiText files) into articles, numbered by their first line."""
    first, held = 1, [""]
    for number, row in rows:
        line = str(row.get(field) or "\n")
        if _ARTICLE.match(line) and any(map(str.strip, held)):
            yield first, {field: "".join(held)}
            first, held = number, []
        held.append(line if line.endswith("\n") else line + "\n")
    if any(map(str.strip, held)):
        yield first, {field: "".join(held)}


def text_lines(path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    """Lines of a text file as rows, for `articles`."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, {"text": line.decode("utf-8")}
            except UnicodeDecodeError as error:
                problems.add("utf-8", str(path), number, "text", f"byte {error.start} is not UTF-8")


def file_sha256(path: Path, cache: Path) -> str:
    """sha256 of the file's bytes; read anew only when its size or time has changed."""
    status = path.stat()
    name = str(path.resolve())
    now = {"path": name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    note = cache / "fingerprints" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if {key: known.get(key) for key in now} == now:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, AttributeError):
        pass  # not known, or a damaged note: hash it
    with _open(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {**now, "sha256": digest})
    return digest
