"""Convert a raw row to a clean row: the column names of oelm, checked texts and an integer label."""

from __future__ import annotations

from typing import Any

from oelm.data.bad_rows import BadRows
from oelm.data.catalogue import Dataset
from oelm.data.sources.readers import CONTINUES, Row, is_utf8


def clean_row(dataset: Dataset, raw: Row, file: str, number: int, bad: BadRows) -> Row | None:
    """Return the clean row of the raw row `raw`; if the row is invalid, add it to `bad` and return None.

    `file` and `number` say where the row is, for the message about an invalid row.
    """
    row: Row = {}
    for name in dataset.columns:
        key = next((key for key in dataset.names_of(name) if key in raw), None)
        if key is None:
            columns = ", ".join(str(key) for key in raw) or "nothing"
            bad.add("field", file, number, name, f"missing; the row has: {columns}")
            return None
        row[name] = raw[key]
    for name in dataset.fields:
        kind, problem = _text_problem(row[name])
        if kind:
            if not (dataset.drops_empty and kind == "empty"):
                bad.add(kind, file, number, name, problem)
            return None
    if dataset.label_names:
        label = _class_index(row["label"], dataset.label_names)
        if label is None:
            names = dataset.label_names
            listed = ", ".join(names)
            valid = listed if _has_numbers(names) else f"0..{len(names) - 1} ({listed})"
            problem = f"is {row['label']!r}, not one of {valid}"
            bad.add("label", file, number, "label", problem)
            return None
        row["label"] = label
    if raw.get(CONTINUES):
        row[CONTINUES] = True
    return row


def _text_problem(value: Any) -> tuple[str, str]:
    """Return (kind, description) of the problem with the text `value`; ("", "") if there is none."""
    if value is None or (isinstance(value, str) and (not value or value.isspace())):
        return "empty", "empty"
    if not isinstance(value, str):
        return "field", f"a {type(value).__name__}, not text"
    return ("", "") if is_utf8(value) else ("utf-8", "contains a lone surrogate, which is not valid text")


def is_number(value: Any) -> bool:
    """Return whether a label is a number, and not a text or a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def label_name(value: Any) -> str:
    """Return the class name that a label stands for; "" if the label is missing (empty, null, NaN, -1)."""
    if isinstance(value, float) and value.is_integer():  # 1.0 is 1: pandas may write 1 as 1.0
        value = int(value)
    if not isinstance(value, (str, int, float)) or value != value:
        return ""
    name = str(value).strip()
    return "" if name == "-1" else name


def _has_numbers(names: tuple[str, ...]) -> bool:
    return any(name.isdecimal() for name in names)


def _class_index(value: Any, names: tuple[str, ...]) -> int | None:
    """Return the class index of a label (a class name or a number); None if there is no such class.

    If a class name is a number, all numbers are names and not indexes.
    """
    numeric = _has_numbers(names)
    if numeric or not is_number(value):
        folded = label_name(value).casefold()
        by_name = {name.casefold(): index for index, name in enumerate(names)}
        if folded in by_name:
            return by_name[folded]
        if numeric:
            return None
        value = int(folded) if folded.isdecimal() else -1
    valid = 0 <= value < len(names) and value == int(value)
    return int(value) if valid else None
