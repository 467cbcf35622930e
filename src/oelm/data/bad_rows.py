"""Collect invalid rows of a dataset and summarise them in one short message."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from oelm.errors import OelmError

_EXAMPLES = 3

_ADVICE = {
    "label": "a label must be a class name; or its index, from 0 to classes - 1, unless a class name is "
    "itself a number. A label of -1 means that the publisher withheld the labels of this split: use the "
    "official validation split as the test split",
    "field": "rename the columns, or list their names in the `aliases` of the dataset",
    "json": "write one JSON object per line",
    "utf-8": "convert the file to UTF-8",
    "empty": "remove the rows, or use --skip-bad-rows",
}


@dataclass
class BadRows:
    """The number of invalid rows of each kind (such as "label"), with a few examples of each kind.

    >>> bad = BadRows()
    >>> for row in range(1, 5001):
    ...     bad.add("label", "train.jsonl", row, "label", "is -1, not one of 0..1")
    >>> print(str(bad).splitlines()[0])
    5,000 bad rows: 5,000 x label
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, file: str, row: int, column: str, problem: str) -> None:
        self.counts[kind] += 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < _EXAMPLES:
            place = f"{file}, row {row}, field '{column}'" if column else f"{file}, row {row}"
            examples.append(f"{place}: {problem}")

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        total = self.counts.total()
        kinds = ", ".join(f"{count:,} x {kind}" for kind, count in self.counts.most_common())
        lines = [f"{total:,} bad {'row' if total == 1 else 'rows'}: {kinds}"]
        for kind, count in self.counts.most_common():
            lines += [f"  {example}" for example in self.examples[kind]]
            if count > _EXAMPLES:
                lines.append(f"  ... and {count - _EXAMPLES:,} more of this kind")
            if kind in _ADVICE:
                lines.append(f"  -> {_ADVICE[kind]}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        return {"total": self.counts.total(), "counts": dict(self.counts), "examples": self.examples}

    def error(self, subject: str) -> OelmError:
        return bad_rows_error(f"{subject}: {self}")


def bad_rows_error(problem: str) -> OelmError:
    """Return an error about invalid rows that tells the user to fix or skip them."""
    return OelmError(problem, remedy="fix the rows, or pass --skip-bad-rows to leave them out.")
