"""Hold out validation and test rows, and find rows that appear in two splits.

The hash of a row's text decides whether the row is held out. So the choice does not depend on file names or
row order, rows with equal texts are in the same split, and a stream has to be read only once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from oelm.data.bad_rows import BadRows
from oelm.data.sources.readers import Row

if TYPE_CHECKING:
    from oelm.data.corpus import Corpus


def text_key(*texts: str) -> int:
    """Return a 64-bit hash of `texts`; texts that differ only in case and white space have the same hash."""
    normal = "\x1f".join(" ".join(text.casefold().split()) for text in texts)
    return int.from_bytes(hashlib.blake2b(normal.encode("utf-8"), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Holdout:
    """The fractions of the train rows that are held out for validation and for test.

    first_rows: hold out rows only from the first n rows of a long stream (0 = from all rows)
    group:      rows with an equal text in this column stay in the same split
    """

    validation: float = 0.0
    test: float = 0.0
    first_rows: int = 0
    group: str = "text"

    def split_of(self, row: Row, index: int) -> str:
        """Return the split to which the train row at position `index` of the source is assigned."""
        if self.first_rows and index >= self.first_rows:
            return "train"
        share = text_key(row[self.group]) / 2.0**64
        if share < self.validation:
            return "validation"
        return "test" if share < self.validation + self.test else "train"

    def is_complete(self, split: str, index: int) -> bool:
        """Return whether all rows held out for `split` come before position `index` of the source."""
        return bool(self.first_rows) and split != "train" and index >= self.first_rows


@dataclass
class DuplicateReport:
    """The number of rows of one split whose text also appears in another split, by (split, other split).

    shares: the fraction of the rows of the other split that this concerns
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    shares: dict[tuple[str, str], float] = field(default_factory=dict)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.counts.total():
            return "no text appears in two splits"
        return "\n".join(
            f"{count:,} rows of {split} also appear in {other}, e.g. {self.examples[split, other]!r}"
            for (split, other), count in self.counts.items()
            if count
        )

    def to_dict(self) -> dict[str, int]:
        return {f"{split} in {other}": count for (split, other), count in self.counts.items()}


def find_duplicates(corpus: Corpus) -> DuplicateReport:
    """Return how many rows have a text (ignoring case and white space) that also appears in another split.

    Only the hashes of the validation and test rows are kept in memory, 8 bytes per row; the train rows are
    streamed.
    """
    report = DuplicateReport()
    seen: dict[str, np.ndarray] = {}
    for split in ("test", "validation", "train"):
        if split not in corpus.splits:
            continue
        own = [np.zeros(0, dtype=np.uint64)]
        shared = {other: [np.zeros(0, dtype=np.uint64)] for other in seen}
        rows = corpus.rows(split, BadRows())  # bad rows are reported by check_corpus
        while chunk := list(itertools.islice(rows, 4096)):
            texts = [[row[name] for name in corpus.fields] for row in chunk]
            keys = np.array([text_key(*row) for row in texts], dtype=np.uint64)
            for other, known in seen.items():
                hits = np.isin(keys, known)
                report.counts[split, other] += int(hits.sum())
                if hits.any():
                    shared[other].append(keys[hits])
                    report.examples.setdefault((split, other), texts[int(np.argmax(hits))][-1][:80])
            if split != "train":
                own.append(keys)
        for other, known in seen.items():
            concerned = int(np.isin(known, np.concatenate(shared[other])).sum())
            report.shares[split, other] = concerned / max(1, len(known))
        seen[split] = np.concatenate(own)
    return report
