"""Who is in which split when the official splits do not say, and who is in two.

A held-out row is chosen by the hash of its own text: the same row is held out whatever file it comes
from and in whatever order, equal texts land on the same side, and one pass over a stream is enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.data.sources.readers import Row

if TYPE_CHECKING:
    from oelm.data.corpus import Corpus


def text_key(*texts: str) -> int:
    """64 bits that equal texts share; case and white space do not count."""
    normal = "\x1f".join(" ".join(text.casefold().split()) for text in texts)
    return int.from_bytes(hashlib.blake2b(normal.encode("utf-8"), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Holdout:
    """Shares of train that serve as validation and test because nothing else does.

    `within` limits the choice to the first so many rows, so that the held-out splits of a long stream are
    found without reading all of it.
    """

    validation: float = 0.0
    test: float = 0.0
    within: int = 0
    group: str = "text"

    def split_of(self, row: Row, index: int) -> str:
        if self.within and index >= self.within:
            return "train"
        place = text_key(row[self.group]) / 2.0**64
        if place < self.validation:
            return "validation"
        return "test" if place < self.validation + self.test else "train"

    def ends(self, split: str, index: int) -> bool:
        """No row of `split` comes at `index` or later."""
        return bool(self.within) and split != "train" and index >= self.within


@dataclass
class DuplicateReport:
    """Rows of one split whose text stands in another, too."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        if not self.total:
            return "no text stands in two splits"
        lines = [
            f"{count:,} rows of {first} also stand in {second}, e.g. {self.examples[first, second]!r}"
            for (first, second), count in self.counts.items()
            if count
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {f"{first} in {second}": count for (first, second), count in self.counts.items()}


def duplicates(corpus: Corpus) -> DuplicateReport:
    """Exact duplicates (up to case and white space) across splits.

    Memory: 8 bytes per row of validation and test; train is only streamed past them.
    """
    report = DuplicateReport()
    held = [split for split in ("test", "validation") if split in corpus.splits]
    known: list[tuple[str, np.ndarray]] = []
    for split in [*held, "train"]:
        if split not in corpus.splits:
            continue
        keys: list[int] = []
        for chunk in _chunks(corpus, split):
            numbers = np.array([key for key, _ in chunk], dtype=np.uint64)
            for other, sorted_keys in known:
                hits = _members(numbers, sorted_keys)
                pair = (split, other)
                report.counts[pair] = report.counts.get(pair, 0) + int(hits.sum())
                if hits.any() and pair not in report.examples:
                    report.examples[pair] = chunk[int(np.argmax(hits))][1]
            if split != "train":
                keys.extend(key for key, _ in chunk)
        known.append((split, np.unique(np.array(keys, dtype=np.uint64))))
    return report


def _chunks(corpus: Corpus, split: str) -> Iterable[list[tuple[int, str]]]:
    from oelm.data.problems import Problems

    chunk: list[tuple[int, str]] = []
    for row in corpus.rows(split, Problems()):  # bad rows are another check's subject
        texts = [row[name] for name in corpus.fields]
        chunk.append((text_key(*texts), texts[-1][:80]))
        if len(chunk) == 4096:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _members(keys: np.ndarray, sorted_keys: np.ndarray) -> np.ndarray:
    if not sorted_keys.size:
        return np.zeros(len(keys), dtype=bool)
    places = np.minimum(np.searchsorted(sorted_keys, keys), sorted_keys.size - 1)
    return sorted_keys[places] == keys
