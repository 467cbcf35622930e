"""What is wrong with rows of data, collected into one message however many there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from oelm.errors import OelmError

_EXAMPLES = 3

_ADVICE = {
    "label": "labels must be 0..classes-1 or a class name; -1 marks rows whose labels were withheld "
    "(such a split cannot be trained or tested on: use the official validation split as the test)",
    "field": "rename the columns, or name them in the dataset's `aliases`",
    "json": "one JSON object per line is expected",
    "utf-8": "convert the file to UTF-8",
    "empty": "remove the rows, or use --skip-bad-rows",
}


@dataclass
class Problems:
    """Bad rows by kind, with the first few of each kept as examples.

    >>> found = Problems()
    >>> for row in range(1, 5001):
    ...     found.add("label", "train.jsonl", row, "label", "is -1, not one of 0..1")
    >>> print(str(found).splitlines()[0])
    5,000 bad rows: 5,000 x label
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, file: str, row: int, name: str, what: str) -> None:
        self.counts[kind] += 1
        kept = self.examples.setdefault(kind, [])
        if len(kept) < _EXAMPLES:
            kept.append(
                f"{file}, row {row}, field '{name}': {what}" if name else f"{file}, row {row}: {what}"
            )

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        rows = "row" if self.total == 1 else "rows"
        kinds = ", ".join(f"{count:,} x {kind}" for kind, count in self.counts.most_common())
        lines = [f"{self.total:,} bad {rows}: {kinds}"]
        for kind, count in self.counts.most_common():
            lines += [f"  {example}" for example in self.examples[kind]]
            if count > _EXAMPLES:
                lines.append(f"  ... and {count - _EXAMPLES:,} more of this kind")
            if kind in _ADVICE:
                lines.append(f"  -> {_ADVICE[kind]}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        return {"total": self.total, "counts": dict(self.counts), "examples": self.examples}

    def error(self, subject: str) -> OelmError:
        return OelmError(
            f"{subject}: {self}\nMend the rows, or pass --skip-bad-rows to leave them out and count them."
        )
