"""A corpus: three splits of clean rows, whatever the source.

Lazy: making one reads no rows, and `rows` streams them anew each time.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from oelm.data.batches.permutation import shuffled
from oelm.data.catalogue import SPLITS, Dataset
from oelm.data.problems import Problems
from oelm.data.sources.readers import Row, clean
from oelm.data.splits import Holdout
from oelm.errors import OelmError, UsageError, unknown_name

_CHOICE = 0x0E1  # the key of the seed-independent choice of rows in `Corpus.limit`


class Source(ABC):
    """Reads the raw rows of a dataset from one place."""

    splits: dict[str, str]  # the splits that exist here -> their names in this source
    streamed: bool = False  # read over a network: reading all rows can take hours
    take_first: bool = False  # a row limit takes the first rows instead of a random sample
    notes: tuple[str, ...] = ()
    folder_note: str = ""  # free text of the owner of a data folder; not copied when results are shared

    @property
    @abstractmethod
    def origin(self) -> str:
        """Where the rows come from, for messages and the manifest."""

    @abstractmethod
    def rows(self, split: str, problems: Problems) -> Iterator[tuple[str, int, Row]]:
        """Yield (file, row number, row); rows that cannot be parsed go into `problems`."""

    @abstractmethod
    def fingerprint(self, split: str) -> str:
        """Return a hash that changes when the content of the split changes."""

    @abstractmethod
    def size(self, split: str) -> tuple[int, int]:
        """Return the expected (bytes, rows) for the progress display; 0 means unknown."""


class Corpus:
    """One dataset from one source: three splits of clean rows."""

    def __init__(
        self, entry: Dataset, source: Source, *, variant: str = "", notes: tuple[str, ...] = ()
    ) -> None:
        self.dataset = entry
        self.name = entry.name
        self.variant = variant
        self.fields = entry.fields
        self.label_names = entry.label_names
        self.task = entry.task
        self.source = source
        self.origin = source.origin
        self.notes = [*source.notes, *notes]
        self.skipped: dict[
            str, dict[str, int]
        ] = {}  # bad rows left out, by split and kind; filled by the consumers
        self._limits: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._holdout = self._missing_splits()
        self.splits = tuple(s for s in SPLITS if s in source.splits or (self._holdout and self._share(s)))

    def _missing_splits(self) -> Holdout | None:
        missing = {split for split in SPLITS if split not in self.source.splits}
        if not missing or "train" in missing:
            return None
        entry = self.dataset
        self.notes += [
            f"{split} is held out of train ({self._share(split):.1%})" for split in SPLITS if split in missing
        ]
        return Holdout(
            validation=entry.validation_share if "validation" in missing else 0.0,
            test=entry.test_share if "test" in missing else 0.0,
            within=entry.holdout_within,
            group=entry.group or entry.fields[0],
        )

    def _share(self, split: str) -> float:
        return {"validation": self.dataset.validation_share, "test": self.dataset.test_share}.get(split, 0.0)

    def rows(self, split: str, problems: Problems | None = None) -> Iterator[Row]:
        """Clean rows in the source's order: the texts under `fields`, and `label` as a class number.

        Bad rows are put into `problems` and left out; without it the first one is an error. A document of a
        text file longer than a few hundred KB comes in pieces, all but the last with `continues` set.
        """
        self.require(split)
        found = Problems() if problems is None else problems
        rows = self._limited(split, found) if split in self._limits else self._all(split, found)
        for row in rows:
            if problems is None and found:
                break
            yield row
        if problems is None and found:
            raise found.error(f"{self.name}/{split}")

    def _all(self, split: str, problems: Problems) -> Iterator[Row]:
        own = split in self.source.splits and (split != "train" or self._holdout is None)
        from_split = split if split in self.source.splits else "train"
        index = 0
        for file, number, raw in self.source.rows(from_split, problems):
            if not own and self._holdout and self._holdout.ends(split, index):
                return
            index += 1
            row = clean(self.dataset, raw, file, number, problems)
            if row is None:
                continue
            if not own and self._holdout:
                if self._holdout.split_of(row, index - 1) != split:
                    continue
                row.pop("continues", None)  # its neighbours may be in another split: each piece stands alone
            yield row

    def _limited(self, split: str, problems: Problems) -> Iterator[Row]:
        limit = self._limits[split]
        if self.source.take_first:
            yield from itertools.islice(self._all(split, problems), limit)
            return
        count = sum(1 for _ in self._all(split, Problems()))
        wanted = iter(np.sort(shuffled(np.arange(min(limit, count)), count, _CHOICE)))
        next_index = next(wanted, None)
        for index, row in enumerate(self._all(split, problems)):
            if index == next_index:
                yield row
                next_index = next(wanted, None)

    def count(self, split: str) -> int:
        """How many good rows the split has. Reads it once."""
        if split not in self._counts:
            self._counts[split] = sum(1 for _ in self.rows(split, Problems()))
        return self._counts[split]

    def limit(self, *, train: int = 0, validation: int = 0, test: int = 0) -> Corpus:
        """The corpus with at most so many rows per split (0 = all): always the same ones, whatever the seed.

        A fixed random choice in the file's order; of a hub stream or a generated corpus, the first ones.
        """
        limits = {"train": train, "validation": validation, "test": test}
        if any(value < 0 for value in limits.values()):
            raise UsageError(f"row limits cannot be negative: {limits}")
        limited = copy.copy(self)
        limited.notes, limited.skipped, limited._counts = list(self.notes), {}, {}
        limited._limits = {split: value for split, value in limits.items() if value}
        limited.notes += [f"{split} is limited to {value:,} rows" for split, value in limited._limits.items()]
        return limited

    def fingerprint(self, split: str) -> str:
        """sha256 that changes whenever the rows of the split may change."""
        self.require(split)
        from_split = split if split in self.source.splits else "train"
        facts = {
            "content": self.source.fingerprint(from_split),
            "fields": self.fields,
            "labels": self.label_names,
            "lines": self.dataset.lines,
            "split": split,
            "holdout": repr(self._holdout) if split == "train" or from_split != split else "",
            "limit": self._limits.get(split, 0),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def expected(self, split: str) -> tuple[int, int]:
        """(bytes, rows) to expect of the split, 0 where unknown: only for showing progress."""
        if split in self._limits:
            return 0, self._limits[split]
        if split in self.source.splits:
            return self.source.size(split)
        size, rows = self.source.size("train")
        if self.dataset.holdout_within:
            size, rows = 0, self.dataset.holdout_within
        return int(size * self._share(split)), int(rows * self._share(split))

    def require(self, split: str) -> None:
        """Raise a helpful error unless the corpus has the split."""
        if split in self.splits:
            return
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        ways = [f"variant '{name}' ({v.about})" for name, v in self.dataset.variants.items() if v.train_from]
        ways += [f"put {split}.jsonl there"] + (["source 'hub'"] if self.dataset.hub else [])
        raise OelmError(f"{self.name} has no {split} split in {self.origin}.", remedy=f"{'; '.join(ways)}.")

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {self.dataset.shape}, from {self.origin})"
