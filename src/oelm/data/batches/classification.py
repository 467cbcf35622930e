"""Encoded rows of a classification, and batches of rows of similar length.

Padding everything to 512 tokens, as is often done, mostly multiplies zeros: `padding_share` says how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oelm.data.batches.permutation import shuffled
from oelm.data.corpus import Corpus
from oelm.data.tokenize.chunks import labelled_chunks
from oelm.data.tokenize.encoding import OnProgress, encode_to_store
from oelm.data.tokenize.store import Store
from oelm.data.tokenize.tokenizers import Tokenizer
from oelm.errors import UsageError

_BUCKET = 128  # batches; rows are sorted by length within so many, and shuffled before and after


class EncodedSplit:
    """Rows as ids, straight from the disk.

    ids:     all rows' ids, one after the other; row i is ids[offsets[i]:offsets[i + 1]]
    lengths: tokens of each row, special tokens included
    labels:  class numbers
    seconds: where the second text of a pair begins in its row (equals the length without one)
    """

    def __init__(self, store: Store) -> None:
        self.meta: dict[str, Any] = store.meta
        self.ids = store["ids"]
        self.offsets = np.concatenate((np.zeros(1, dtype=np.int64), store["ends"]))
        self.lengths = np.diff(self.offsets)
        self.labels = np.asarray(store["labels"], dtype=np.int64)
        self.seconds = np.asarray(store["seconds"], dtype=np.int64)
        self.pad_id = int(self.meta["tokenizer"]["pad_id"])

    def __len__(self) -> int:
        return len(self.lengths)

    def collate(
        self, rows: Sequence[int] | np.ndarray, *, pad_to: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids (B, T), lengths (B,), labels (B,)), all int64; T is the longest row's length, or `pad_to`."""
        chosen = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[chosen]
        width = np.arange(max(pad_to, int(lengths.max())))
        valid = width < lengths[:, None]  # (B, T)
        places = np.where(valid, self.offsets[chosen][:, None] + width, 0)
        ids = np.where(valid, self.ids[places].astype(np.int64), self.pad_id)
        return torch.from_numpy(ids), torch.from_numpy(lengths), torch.from_numpy(self.labels[chosen])

    def token_types(self, rows: Sequence[int] | np.ndarray, width: int) -> torch.Tensor:
        """(B, width) int64, 1 on the second text of a pair: the segment ids BERT was pretrained with."""
        chosen = np.asarray(rows, dtype=np.int64)
        places = np.arange(width)
        second = (places >= self.seconds[chosen][:, None]) & (places < self.lengths[chosen][:, None])
        return torch.from_numpy(second.astype(np.int64))


def encode_split(
    corpus: Corpus,
    split: str,
    tokenizer: Tokenizer,
    max_length: int,
    *,
    cache_dir: Path | str | None = None,
    workers: int = 0,
    progress: OnProgress | None = None,
    skip_bad_rows: bool = False,
) -> EncodedSplit:
    """Encode a labelled split, or open it when that has been done for this content, tokenizer and length."""
    if corpus.task != "classification":
        raise UsageError(f"dataset '{corpus.name}' has no labels, so it cannot be classified")
    store = encode_to_store(
        corpus,
        split,
        tokenizer,
        kind="classification",
        make_chunks=partial(labelled_chunks, fields=corpus.fields, max_length=max_length),
        columns={"ids": tokenizer.dtype.str, "ends": "<i8", "labels": "<i4", "seconds": "<i4"},
        facts={"max_length": max_length, "classes": len(corpus.label_names)},
        cache_dir=cache_dir,
        workers=workers,
        progress=progress,
        skip_bad_rows=skip_bad_rows,
    )
    return EncodedSplit(store)


class BatchPlan:
    """Which rows form batch i: a pure function of (seed, i), so any resume point is exact.

    Each epoch uses every row exactly once; the one partial batch is kept. Rows are shuffled, sorted by length
    within buckets of 128 batches, cut, and the batches shuffled: little padding, much chance.

    With `token_budget`, batches hold as many rows as fit into that many padded tokens instead of
    `batch_size` rows. Rows are then sorted over the whole split (ties by chance), so that the number of
    batches is the same in every epoch.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, batch_size: int, seed: int, *, token_budget: int = 0
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_size, self.seed, self.token_budget = batch_size, seed, token_budget
        if not len(self.lengths):
            raise UsageError("a batch plan needs at least one row")
        if batch_size < 1:
            raise UsageError(f"batch size must be at least 1, not {batch_size}")
        if token_budget and token_budget < self.lengths.max():
            raise UsageError(f"token budget {token_budget}: the longest row alone has {self.lengths.max()}")
        self._cuts = self._find_cuts()
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def _find_cuts(self) -> np.ndarray:
        """Borders between batches in the sorted order; the same in every epoch."""
        count = len(self.lengths)
        if not self.token_budget:
            return np.append(np.arange(0, count, self.batch_size), count)
        cuts, begin = [0], 0
        for position, length in enumerate(np.sort(self.lengths).tolist()):
            if (position + 1 - begin) * length > self.token_budget:
                cuts.append(position)
                begin = position
        return np.array([*cuts, count])

    @property
    def batches_per_epoch(self) -> int:
        return len(self._cuts) - 1

    def batch(self, index: int) -> np.ndarray:
        """Row numbers of batch `index`, counted over all epochs."""
        epoch, place = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._sorted(epoch)
        chosen = int(shuffled([place], self.batches_per_epoch, self.seed, epoch, 1)[0])
        return self._order[self._cuts[chosen] : self._cuts[chosen + 1]]

    def _sorted(self, epoch: int) -> np.ndarray:
        count = len(self.lengths)
        order = shuffled(np.arange(count), count, self.seed, epoch)
        size = count if self.token_budget else self.batch_size * _BUCKET
        bucket = np.arange(count) // size
        return order[np.lexsort((self.lengths[order], bucket))]

    def padding_share(self, *, pad_to: int = 0) -> float:
        """The share of padding in epoch 0; with `pad_to`, as if every row were padded to that."""
        real = int(self.lengths.sum())
        if pad_to:
            return 1 - real / (len(self.lengths) * max(pad_to, int(self.lengths.max())))
        rows = self._sorted(0)
        longest = np.maximum.reduceat(self.lengths[rows], self._cuts[:-1])
        return 1 - real / int((longest * np.diff(self._cuts)).sum())


def eval_batches(lengths: Sequence[int] | np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Row numbers for evaluation, sorted by length; every row once. Put results back by row number."""
    order = np.argsort(np.asarray(lengths), kind="stable")
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]
