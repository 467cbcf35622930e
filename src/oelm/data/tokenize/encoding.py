"""From a corpus' split to a store of ids: streamed, on all cores, in bounded memory, restartable.

Language modelling and classification differ in their chunks (`chunks`); the way is the same.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from oelm.cores import usable_cores
from oelm.data.corpus import Corpus
from oelm.data.problems import Problems
from oelm.data.sources.readers import Row
from oelm.data.tokenize.pool import encode_chunks
from oelm.data.tokenize.store import Store, StoreWriter, cache_root, locked, open_store
from oelm.data.tokenize.tokenizers import Tokenizer
from oelm.errors import OelmError

_COMMIT_SECONDS = 2.0


@dataclass(frozen=True)
class EncodingProgress:
    """How far it is. `total_bytes` and `total_rows` are estimates, 0 when unknown."""

    split: str
    rows: int
    bytes: int
    tokens: int
    total_bytes: int
    total_rows: int
    seconds: float
    bytes_before: int = 0  # done by an earlier process that was stopped

    @property
    def share(self) -> float | None:
        for done, total in ((self.bytes, self.total_bytes), (self.rows, self.total_rows)):
            if total:
                return min(1.0, done / total)
        return None

    @property
    def megabytes_per_second(self) -> float:
        return (self.bytes - self.bytes_before) / 1e6 / max(self.seconds, 1e-9)

    @property
    def eta_seconds(self) -> float | None:
        if not self.share or self.bytes <= self.bytes_before:
            return None
        left = self.bytes * (1 - self.share) / self.share
        return self.seconds * left / (self.bytes - self.bytes_before)


OnProgress = Callable[[EncodingProgress], None]


class RowChunk(Protocol):
    """Consecutive rows of a split; `encode` gives its columns, `ends` relative to the chunk's first id."""

    rows: int
    bytes: int
    whole: bool  # it ends with the end of a row, so a restart can go on behind it

    def encode(self, tokenizer: Tokenizer) -> dict[str, np.ndarray]: ...


def encode_to_store(
    corpus: Corpus,
    split: str,
    tokenizer: Tokenizer,
    *,
    kind: str,
    make_chunks: Callable[[Iterable[Row]], Iterator[Any]],
    columns: dict[str, str],
    facts: dict[str, Any],
    cache_dir: Path | str | None,
    workers: int,
    progress: OnProgress | None,
    skip_bad_rows: bool,
) -> Store:
    """The store of this content, tokenizer and `facts`: the cached one, or made now."""
    identity = {"corpus": corpus.fingerprint(split), "tokenizer": tokenizer.hash, **facts}
    key = hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()
    folder = cache_root(cache_dir) / kind / f"{corpus.dataset.name}-{split}-{key[:24]}"
    store = open_store(folder)
    if store is None:
        with locked(folder):
            store = open_store(folder)  # another process may have made it while we waited
            if store is None:
                writer = StoreWriter(folder, columns)
                job = _Job(corpus, split, tokenizer, writer, progress, skip_bad_rows)
                try:
                    job.run(make_chunks, workers or usable_cores())
                finally:
                    writer.close()
                store = writer.finish(job.meta(identity, facts))
    if store.meta["bad_rows"]:
        if not skip_bad_rows:  # it was made by a run that skipped them
            raise OelmError(
                f"{corpus.name}/{split}: {store.meta['bad_rows_found']}\nPass --skip-bad-rows to go on."
            )
        corpus.skipped[split] = store.meta["bad_rows"]
    return store


class _Job:
    """One pass over one split."""

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        tokenizer: Tokenizer,
        writer: StoreWriter,
        progress: OnProgress | None,
        skip_bad_rows: bool,
    ) -> None:
        self.corpus, self.split, self.tokenizer, self.writer = corpus, split, tokenizer, writer
        self.report, self.skip = progress, skip_bad_rows
        self.rows = int(writer.state.get("rows", 0))
        self.bytes = int(writer.state.get("bytes", 0))
        self._bytes_before = self.bytes
        self.problems = Problems()

    def run(self, make_chunks: Callable[[Iterable[Row]], Iterator[Any]], workers: int) -> None:
        """Encode what is not yet encoded."""
        rows = self.corpus.rows(self.split, self.problems)
        # A restart reads again what was done (cheap) and encodes only the rest.
        rest = itertools.islice(rows, self.rows, None)
        self._started = committed = time.monotonic()
        for chunk, arrays in encode_chunks(make_chunks(self._until_bad(rest)), self.tokenizer, workers):
            arrays["ends"] = arrays["ends"] + self.writer.count("ids")
            self.writer.append(arrays)
            self.rows, self.bytes = self.rows + chunk.rows, self.bytes + chunk.bytes
            if chunk.whole and time.monotonic() - committed > _COMMIT_SECONDS:
                self._commit()
                committed = time.monotonic()
            self._show()
        if self.problems and not self.skip:
            raise self.problems.error(f"{self.corpus.name}/{self.split}")
        if not self.rows:
            raise OelmError(f"{self.corpus.name}/{self.split} has no rows ({self.corpus.origin})")
        self._commit()

    def _until_bad(self, rows: Iterator[Row]) -> Iterator[Row]:
        """All rows; but once one is bad and that is an error, none: the rest is read only for the report."""
        for row in rows:
            if not self.problems or self.skip:
                yield row

    def _commit(self) -> None:
        self.writer.commit({"rows": self.rows, "bytes": self.bytes})

    def _show(self) -> None:
        if self.report is not None:
            total_bytes, total_rows = self.corpus.expected(self.split)
            seconds = time.monotonic() - self._started
            self.report(
                EncodingProgress(
                    split=self.split,
                    rows=self.rows,
                    bytes=self.bytes,
                    tokens=self.writer.count("ids"),
                    total_bytes=total_bytes,
                    total_rows=total_rows,
                    seconds=seconds,
                    bytes_before=self._bytes_before,
                )
            )

    def meta(self, identity: dict[str, str], facts: dict[str, Any]) -> dict[str, Any]:
        return {
            "dataset": self.corpus.name,
            "split": self.split,
            "origin": self.corpus.origin,
            "corpus_hash": identity["corpus"],
            "tokenizer": {
                "name": self.tokenizer.name,
                "hash": self.tokenizer.hash,
                "vocab_size": self.tokenizer.vocab_size,
                "eos_id": self.tokenizer.eos_id,
                "pad_id": self.tokenizer.pad_id,
            },
            "rows": self.rows,
            "text_bytes": self.bytes,
            "bad_rows": dict(self.problems.counts),
            "bad_rows_found": str(self.problems) if self.problems else "",
            **facts,
        }
