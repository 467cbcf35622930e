"""Tokenize a split of a corpus in several processes and store the tokens on disk.

Only a few chunks of rows are in memory at a time. An interrupted process can be resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from oelm.cores import usable_cores
from oelm.data.bad_rows import BadRows, bad_rows_error
from oelm.data.corpus import Corpus
from oelm.data.sources.readers import Row
from oelm.data.tokenize.chunks import Chunk
from oelm.data.tokenize.pool import encode_chunks
from oelm.data.tokenize.store import Store, StoreWriter, cache_root, locked, open_store
from oelm.data.tokenize.tokenizers import Tokenizer
from oelm.errors import OelmError

_COMMIT_SECONDS = 2.0


@dataclass(frozen=True)
class EncodingProgress:
    """The progress of tokenizing one split. `total_bytes` and `total_rows` are estimates, or 0 if unknown."""

    split: str
    rows: int
    bytes: int
    tokens: int
    total_bytes: int
    total_rows: int
    seconds: float
    bytes_before: int = 0  # bytes that an earlier, interrupted process has tokenized

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
MakeChunks = Callable[[Iterable[Row]], Iterator[Chunk]]


class EncodeOptions(TypedDict, total=False):
    """Options of `prepare_tokens()` and `encode_split()`.

    cache_dir:     folder of the token cache; default: $OELM_CACHE_DIR or ~/.cache/oelm
    workers:       number of worker processes; 0 = one per core
    progress:      a function that is called with the progress after each chunk of rows
    skip_bad_rows: skip and count bad rows, instead of raising an error
    """

    cache_dir: Path | str | None
    workers: int
    progress: OnProgress | None
    skip_bad_rows: bool


def encode_to_store(
    corpus: Corpus,
    split: str,
    tokenizer: Tokenizer,
    *,
    kind: str,
    make_chunks: MakeChunks,
    columns: dict[str, str],
    facts: dict[str, Any],
    options: EncodeOptions,
) -> Store:
    """Return the tokens of a split from the cache; tokenize the split if the cache does not have it.

    kind:        name of the sub-folder of the cache that contains the stored tokens
    make_chunks: groups the rows into chunks, which the worker processes tokenize
    columns:     {array: dtype} of the arrays to store
    facts:       further settings that the tokens depend on, such as max_length
    """
    identity = {"corpus": corpus.cache_key(split), "tokenizer": tokenizer.hash, **facts}
    key = hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()
    folder = cache_root(options.get("cache_dir")) / kind / f"{corpus.dataset.name}-{split}-{key[:24]}"
    store = open_store(folder)
    if store is None:
        with locked(folder):
            store = open_store(folder)  # another process may have finished while this one waited for the lock
            if store is None:
                store = _Encoder(corpus, split, tokenizer, options).run(folder, columns, make_chunks, facts)
    if store.meta["bad_rows"]:
        if not options.get("skip_bad_rows"):  # an earlier call with skip_bad_rows=True cached them
            raise bad_rows_error(f"{corpus.name}/{split}: {store.meta['bad_rows_summary']}")
        corpus.skipped[split] = store.meta["bad_rows"]
    return store


class _Encoder:
    """Tokenizes one split and writes the tokens to a store."""

    def __init__(self, corpus: Corpus, split: str, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self.corpus, self.split, self.tokenizer = corpus, split, tokenizer
        self.on_progress, self.skip = options.get("progress"), options.get("skip_bad_rows", False)
        self.workers = options.get("workers") or usable_cores()
        self.bad_rows = BadRows()

    def run(
        self, folder: Path, columns: dict[str, str], make_chunks: MakeChunks, facts: dict[str, Any]
    ) -> Store:
        writer = StoreWriter(folder, columns)
        try:
            self._encode(writer, make_chunks)
        finally:
            writer.close()
        return writer.finish({**self._meta(), **facts})

    def _encode(self, writer: StoreWriter, make_chunks: MakeChunks) -> None:
        self.rows, self.bytes = int(writer.state.get("rows", 0)), int(writer.state.get("bytes", 0))
        rows = self.corpus.rows(self.split, self.bad_rows)
        # Skip the first `self.rows` rows, which an interrupted process has already tokenized.
        rest = self._until_bad(itertools.islice(rows, self.rows, None))
        bytes_before, started = self.bytes, time.monotonic()
        committed = started
        for chunk, arrays in encode_chunks(make_chunks(rest), self.tokenizer, self.workers):
            arrays["ends"] = arrays["ends"] + writer.count("ids")
            writer.append(arrays)
            self.rows, self.bytes = self.rows + chunk.rows, self.bytes + chunk.bytes
            if chunk.ends_at_row and time.monotonic() - committed > _COMMIT_SECONDS:
                writer.commit({"rows": self.rows, "bytes": self.bytes})
                committed = time.monotonic()
            self._report(writer.count("ids"), time.monotonic() - started, bytes_before)
        if self.bad_rows and not self.skip:
            raise self.bad_rows.error(f"{self.corpus.name}/{self.split}")
        if not self.rows:
            advice = self.corpus.holdout_advice(self.split) or ": add some"
            raise OelmError(f"{self.corpus.name}/{self.split} has no rows ({self.corpus.origin}){advice}")
        writer.commit({"rows": self.rows, "bytes": self.bytes})

    def _until_bad(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the rows before the first bad row; with `skip_bad_rows`, yield all good rows.

        All rows are read in any case, so that the error can report the number of bad rows.
        """
        for row in rows:
            if not self.bad_rows or self.skip:
                yield row

    def _report(self, tokens: int, seconds: float, bytes_before: int) -> None:
        if self.on_progress is None:
            return
        total_bytes, total_rows = self.corpus.expected_size(self.split)
        self.on_progress(
            EncodingProgress(
                split=self.split,
                rows=self.rows,
                bytes=self.bytes,
                tokens=tokens,
                total_bytes=total_bytes,
                total_rows=total_rows,
                seconds=seconds,
                bytes_before=bytes_before,
            )
        )

    def _meta(self) -> dict[str, Any]:
        return {
            "dataset": self.corpus.name,
            "split": self.split,
            "origin": self.corpus.origin,
            "corpus_hash": self.corpus.fingerprint(self.split),
            "tokenizer": {
                "name": self.tokenizer.name,
                "hash": self.tokenizer.hash,
                "vocab_size": self.tokenizer.vocab_size,
                "eos_id": self.tokenizer.eos_id,
                "pad_id": self.tokenizer.pad_id,
            },
            "rows": self.rows,
            "text_bytes": self.bytes,
            "bad_rows": dict(self.bad_rows.counts),
            "bad_rows_summary": str(self.bad_rows) if self.bad_rows else "",
        }
