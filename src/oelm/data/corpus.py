"""A dataset from one source, as train, validation and test splits of clean rows.

A clean row has the column names of oelm, checked texts and an integer label. Creating a `Corpus` reads no
rows; each call of `Corpus.rows()` reads them from the source again.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from oelm.data.bad_rows import BadRows
from oelm.data.batches.permutation import shuffled
from oelm.data.catalogue import OWN_DATASETS, SPLITS, Dataset
from oelm.data.sources.clean import clean_row
from oelm.data.sources.readers import CONTINUES, Row
from oelm.data.splits import Holdout
from oelm.errors import OelmError, UsageError, unknown_name

# The seed with which `Corpus.limit()` selects rows. It is fixed, so that all runs use the same rows.
_LIMIT_KEY = 0x0E1


class Source(ABC):
    """Reads the raw rows of a dataset from one place: a local folder, the hub, a package or a generator."""

    splits: dict[str, str]  # name of each split in oelm -> its name in the source
    streamed: bool = False  # whether rows are read over the network, which can take hours for all rows
    take_first: bool = False  # whether `Corpus.limit()` takes the first rows instead of a random sample
    notes: tuple[str, ...] = ()
    folder_note: str = ""  # "notes" in the data folder's dataset_info.json; not copied into kept results

    @property
    @abstractmethod
    def origin(self) -> str:
        """A text that says where the rows come from, for messages and manifest.json."""

    @abstractmethod
    def rows(self, split: str, bad: BadRows) -> Iterator[tuple[str, int, Row]]:
        """Yield (file, row number, row). Rows that cannot be parsed are added to `bad`."""

    @abstractmethod
    def fingerprint(self, split: str) -> str:
        """Return a hash that changes when the content of the split changes."""

    def reader(self, split: str) -> str:
        """Return how the files of a split are read, as a part of cache keys; "" if there is only one way."""
        return ""

    @abstractmethod
    def size(self, split: str) -> tuple[int, int]:
        """Return the expected (bytes, rows) of a split for the progress display; 0 means unknown."""


class Corpus:
    """One dataset as train, validation and test splits of clean rows.

    skipped: {split: {kind of bad row: number of skipped rows}}; filled when a split is tokenized
    """

    def __init__(self, entry: Dataset, source: Source, *, notes: tuple[str, ...] = ()) -> None:
        self.dataset = entry
        self.name = entry.name
        self.fields = entry.fields
        self.label_names = entry.label_names
        self.task = entry.task
        self.source = source
        self.origin = source.origin
        self.notes = [*source.notes, *notes]
        self.skipped: dict[str, dict[str, int]] = {}
        self._limits: dict[str, int] = {}
        self._holdout = self._make_holdout()
        self.splits = tuple(s for s in SPLITS if s in source.splits or (self._holdout and self._share(s)))

    def _make_holdout(self) -> Holdout | None:
        """Return which fractions of the train rows replace missing splits; None if no split is missing."""
        missing = [split for split in SPLITS if split not in self.source.splits]
        if not missing or "train" in missing:
            return None
        entry = self.dataset
        self.notes += [f"{split} is held out of train ({self._share(split):.1%})" for split in missing]
        return Holdout(
            validation=entry.validation_share if "validation" in missing else 0.0,
            test=entry.test_share if "test" in missing else 0.0,
            first_rows=entry.holdout_first_rows,
            group=entry.group or entry.fields[0],
        )

    def _share(self, split: str) -> float:
        return {"validation": self.dataset.validation_share, "test": self.dataset.test_share}.get(split, 0.0)

    def rows(self, split: str, bad: BadRows | None = None) -> Iterator[Row]:
        """Yield the clean rows of a split, such as {"text": ..., "label": 1}, in the order of the source.

        Bad rows are added to `bad` and skipped; if `bad` is None, a bad row raises an error. A document
        larger than a few hundred KB is split into several rows; all but the last have the key CONTINUES.
        """
        self.require_split(split)
        found = BadRows() if bad is None else bad
        for row in self._limited(split, found) if split in self._limits else self._all(split, found):
            if bad is None and found:
                break
            yield row
        if bad is None and found:
            raise found.error(f"{self.name}/{split}")

    def _all(self, split: str, bad: BadRows) -> Iterator[Row]:
        source_split = split if split in self.source.splits else "train"
        holdout = self._holdout if source_split == "train" else None
        for index, (file, number, raw) in enumerate(self.source.rows(source_split, bad)):
            if holdout and holdout.is_complete(split, index):
                return
            row = clean_row(self.dataset, raw, file, number, bad)
            if row is None:
                continue
            if holdout:
                if holdout.split_of(row, index) != split:
                    continue
                row.pop(CONTINUES, None)  # the next piece of the document may be in another split
            yield row

    def _limited(self, split: str, bad: BadRows) -> Iterator[Row]:
        limit = self._limits[split]
        if self.source.take_first:
            yield from itertools.islice(self._all(split, bad), limit)
            return
        count = sum(1 for _ in self._all(split, BadRows()))
        chosen = iter(np.sort(shuffled(np.arange(min(limit, count)), count, _LIMIT_KEY)))
        next_index = next(chosen, None)
        for index, row in enumerate(self._all(split, bad)):
            if index == next_index:
                next_index = next(chosen, None)
                if next_index != index + 1:
                    row.pop(CONTINUES, None)  # the next piece of the document is not in the sample
                yield row

    def limit(self, *, train: int = 0, validation: int = 0, test: int = 0) -> Corpus:
        """Return a copy of the corpus with at most `train`, `validation` and `test` rows (0 = all).

        The rows are a random sample in the order of the files. The sample does not depend on the seed of the
        run. Streams from the hub and generated text are not sampled; their first rows are taken.
        """
        limits = {"train": train, "validation": validation, "test": test}
        if any(value < 0 for value in limits.values()):
            raise UsageError(f"row limits must be 0 (all rows) or more, got {limits}")
        limited = copy.copy(self)
        limited.skipped = {}
        limited._limits = {split: value for split, value in limits.items() if value}
        limited.notes = self.notes + [f"{s} is limited to {n:,} rows" for s, n in limited._limits.items()]
        return limited

    def fingerprint(self, split: str) -> str:
        """Return a SHA-256 that changes when the rows of the split change."""
        self.require_split(split)
        source_split = split if split in self.source.splits else "train"
        facts = {
            "content": self.source.fingerprint(source_split),
            "fields": self.fields,
            "labels": self.label_names,
            "lines": self.dataset.lines,
            "split": split,
            "holdout": repr(self._holdout) if source_split == "train" else "",
            "limit": self._limits.get(split, 0),
        }
        if self.dataset.name not in OWN_DATASETS:  # the user may register it with other columns
            facts["aliases"] = {name: self._recorded_names(name) for name in self.dataset.aliases}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def cache_key(self, split: str) -> str:
        """Return a SHA-256 that changes when the rows of the split change or are read in another way.

        It is not recorded with a run, so that a new way to read files does not change the fingerprints.
        """
        reader = self.source.reader(split if split in self.source.splits else "train")
        fingerprint = self.fingerprint(split)
        return hashlib.sha256(f"{fingerprint} {reader}".encode()).hexdigest() if reader else fingerprint

    def _recorded_names(self, column: str) -> list[str]:
        """Return the names of a column for the fingerprint; its own name is left out if it is tried first."""
        names = list(self.dataset.names_of(column))
        return names[1:] if names[0] == column else names

    def expected_size(self, split: str) -> tuple[int, int]:
        """Return the expected (bytes, rows) of the split for the progress display; 0 means unknown."""
        if split in self._limits:
            return 0, self._limits[split]
        if split in self.source.splits:
            return self.source.size(split)
        size, rows = self.source.size("train")
        if self.dataset.holdout_first_rows:
            size, rows = 0, self.dataset.holdout_first_rows
        return int(size * self._share(split)), int(rows * self._share(split))

    def require_split(self, split: str) -> None:
        """Raise OelmError if the corpus does not have `split`; the message says how to add the split."""
        if split in self.splits:
            return
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        hub = "; or use source 'hub'" if self.dataset.hub else ""
        raise OelmError(
            f"{self.name} has no {split} split in {self.origin}.", remedy=f"add a file {split}.jsonl{hub}."
        )

    def holdout_advice(self, split: str) -> str:
        """Return what to do if `split` is held out of train and has no rows; "" if it has own files."""
        return "" if split in self.source.splits else f": train is too small; add a file {split}.jsonl"

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {self.dataset.shape}, from {self.origin})"
