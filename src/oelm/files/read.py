"""Read untrusted JSON files with limits on their size and depth; every problem raises `OelmError`.

All JSON files of run folders, archives and users are read by these functions (YAML files: `oelm.files.yaml`).
They refuse content that can exhaust memory or the stack (files over a size limit, nesting deeper than
`MAX_DEPTH`), ambiguous content (duplicate keys, NaN, invalid UTF-8), and named pipes, which would block.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from oelm.errors import OelmError
from oelm.units import bytes_text

MIB = 1 << 20
# The largest accepted size of each kind of file.
JSON_BYTES = 16 * MIB  # status, results, manifest and audit files, which usually have a few KB
PREDICTIONS_BYTES = 256 * MIB  # predictions.json, with a label and a prediction per test example
ROW_BYTES = 4 * MIB  # one line of metrics.jsonl; the longest (per-head statistics) have about 10 KB
LOG_BYTES = 4096 * MIB  # a log file, which may be larger than the memory because it is read line by line
TOKENIZER_BYTES = 256 * MIB  # tokenizer.json; the largest public tokenizers have about 30 MB

MAX_DEPTH = 50  # levels of nested lists and objects; the JSON files of a run have at most 6 levels
_FIRST_READ = 64 * 1024  # bytes; a read reserves all memory that it asks for, and most files are much smaller
# Limits the number of lists and objects, because "[]" has 2 bytes in a file but takes 56 bytes of memory.
MAX_CONTAINERS = 2_000_000


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a file for reading. Raise OelmError if it is a pipe, a device or a folder."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer forever.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OelmError(f"{path}: not a regular file, but a pipe, a device or a folder")
    return file


def read_bytes(path: Path | str, *, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raise OelmError if it is larger than `max_bytes`."""
    with open_regular(path) as file:
        return read_limited(file, str(path), max_bytes)


def read_limited(file: IO[bytes], where: str, max_bytes: int) -> bytes:
    """Return the rest of an open file. Raise OelmError if the rest is larger than `max_bytes`."""
    first = min(_FIRST_READ, max_bytes + 1)
    content = file.read(first)
    if len(content) == first < max_bytes + 1:
        content += file.read(max_bytes + 1 - first)
    if len(content) > max_bytes:
        raise OelmError(f"{where}: larger than {bytes_text(max_bytes)}, the limit for this kind of file")
    return content


def read_text(path: Path | str, *, max_bytes: int) -> str:
    """Return the content of a UTF-8 text file."""
    return decode(read_bytes(path, max_bytes=max_bytes), str(path))


def read_json(path: Path | str) -> Any:
    """Return the value that a JSON file contains: an object, a list, a text, a number, ..."""
    return parse_json(read_text(path, max_bytes=JSON_BYTES), str(path))


def read_json_object(path: Path | str) -> dict[str, Any]:
    """Return the JSON object in a file. Raise OelmError if the file contains another JSON type."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise OelmError(f"{path}: expected a JSON object")
    return value


def read_json_lines(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one object per line."""
    with open_regular(path) as file:
        yield from parse_json_lines(file, str(path))


def parse_json_lines(file: IO[bytes], where: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an open file with one object per line; skip an incomplete last line."""
    number = 0
    while line := file.readline(ROW_BYTES + 1):
        number += 1
        place = f"{where}, line {number}"
        if len(line) > ROW_BYTES:
            raise OelmError(f"{place}: the line is longer than {bytes_text(ROW_BYTES)}, the limit")
        if not line.endswith(b"\n"):
            return
        row = parse_json(decode(line, place), place)
        if not isinstance(row, dict):
            raise OelmError(f"{place}: expected a JSON object")
        yield row


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; `where` is the name of the file, for error messages.

    >>> parse_json('{"a": 1, "a": 2}', "x.json")
    Traceback (most recent call last):
    oelm.errors.OelmError: x.json: not JSON (the key 'a' appears twice)
    """
    _check_json_depth(text, where)
    try:
        long = _PERHAPS_LONG.search(text[::30]) and _LONG_INTEGER.search(text)
        value = (_LIMITS_INTEGERS if long else _DECODER).decode(text)
    except (ValueError, RecursionError) as error:  # int() raises ValueError for over 4300 digits
        raise OelmError(f"{where}: not JSON ({error})") from None
    if "\\u" in text and _HALF_SURROGATE.search(text):
        refuse_half_characters(value, where)
    return value


_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)
_LONG_INTEGER = re.compile(r"\d{300}")
_PERHAPS_LONG = re.compile(r"\d{10}")  # in every 30th character: a quick test that finds each long integer
_HALF_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _check_json_depth(text: str, where: str) -> None:
    """Raise OelmError if the JSON text is nested too deeply, or has too many lists and objects, to parse."""
    containers = text.count("[") + text.count("{")
    if containers <= MAX_DEPTH:
        return
    if containers > MAX_CONTAINERS:
        raise OelmError(f"{where}: refused, because it has more than {MAX_CONTAINERS:,} lists and objects")
    depth = 0
    for match in _BRACKETS.finditer(text):
        character = match[0]
        if character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise OelmError(f"{where}: refused, because it is nested deeper than {MAX_DEPTH} levels")
        elif character in "]}":
            depth -= 1


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{twice}' appears twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _finite_int(text: str) -> int:
    """Return `text` as an integer. Raise ValueError if the integer is too large to be converted to float."""
    value = int(text)
    if abs(value) >= 10**300:
        raise ValueError(f"{text[:20]}... is too large a number")
    return value


def _decoder(parse_int: Callable[[str], int] | None = None) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_unique_keys,
        parse_constant=_refuse_constant,
        parse_float=_finite_float,
        parse_int=parse_int,
    )


_DECODER = _decoder()
_LIMITS_INTEGERS = _decoder(_finite_int)  # slow, because it calls a function for every integer


def refuse_half_characters(value: Any, where: str) -> None:
    r"""Raise OelmError if a text in `value` has a lone surrogate ("\ud800"), which cannot be printed."""
    if isinstance(value, dict):
        for name, inner in value.items():
            refuse_half_characters(name, where)
            refuse_half_characters(inner, where)
    elif isinstance(value, list):
        for inner in value:
            refuse_half_characters(inner, where)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise OelmError(f"{where}: a text contains a lone UTF-16 surrogate ({value[:40]!a})") from None


def decode(content: bytes, where: str) -> str:
    """Return UTF-8 bytes as text. For invalid UTF-8 raise an OelmError that names the byte and the line."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise OelmError(f"{where}: not UTF-8 text (byte {error.start}, line {line})") from None
