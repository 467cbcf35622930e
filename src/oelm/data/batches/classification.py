"""The tokenized rows of a classification dataset, and batches of rows of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch

from oelm.data.batches.permutation import shuffled
from oelm.data.corpus import Corpus
from oelm.data.tokenize.chunks import labelled_chunks
from oelm.data.tokenize.encoding import EncodeOptions, encode_to_store
from oelm.data.tokenize.store import Store
from oelm.data.tokenize.tokenizers import Tokenizer
from oelm.errors import UsageError

_BUCKET_BATCHES = 128


class EncodedSplit:
    """The tokenized rows of a split, memory-mapped.

    ids:           token ids of all rows; row i is ids[offsets[i]:offsets[i + 1]]
    lengths:       number of tokens of each row, including special tokens
    labels:        class index of each row
    second_starts: position in each row at which the second text of a text pair starts; the length of the row
                   if it has only one text
    """

    def __init__(self, store: Store) -> None:
        self.meta: dict[str, Any] = store.meta
        self.ids = store["ids"]
        self.offsets = np.concatenate((np.zeros(1, dtype=np.int64), store["ends"]))
        self.lengths = np.diff(self.offsets)
        self.labels = np.asarray(store["labels"], dtype=np.int64)
        self.second_starts = np.asarray(store["second_starts"], dtype=np.int64)
        self.pad_id = int(self.meta["tokenizer"]["pad_id"])

    def __len__(self) -> int:
        return len(self.lengths)

    def collate(
        self, rows: Sequence[int] | np.ndarray, *, pad_to: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids (B, T), lengths (B,) and labels (B,) of `rows` as int64, padded to T tokens.

        T is the length of the longest row, or `pad_to` if that is larger.
        """
        chosen = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[chosen]
        positions = np.arange(max(pad_to, int(lengths.max())))
        valid = positions < lengths[:, None]  # (B, T)
        index = np.where(valid, self.offsets[chosen][:, None] + positions, 0)
        ids = np.where(valid, self.ids[index].astype(np.int64), self.pad_id)
        return torch.from_numpy(ids), torch.from_numpy(lengths), torch.from_numpy(self.labels[chosen])

    def token_types(self, rows: Sequence[int] | np.ndarray, width: int) -> torch.Tensor:
        """Return BERT's token type ids (B, width) as int64: 1 for tokens of the second text, else 0."""
        chosen = np.asarray(rows, dtype=np.int64)
        positions = np.arange(width)
        starts, lengths = self.second_starts[chosen][:, None], self.lengths[chosen][:, None]
        return torch.from_numpy(((positions >= starts) & (positions < lengths)).astype(np.int64))


def encode_split(
    corpus: Corpus, split: str, tokenizer: Tokenizer, max_length: int, **options: Unpack[EncodeOptions]
) -> EncodedSplit:
    """Return the tokenized rows of a labelled split, from the cache if they were tokenized before."""
    if corpus.task != "classification":
        raise UsageError(
            f"dataset '{corpus.name}' has no labels, so it cannot be used for classification: choose another "
            "dataset (`oelm data list`)"
        )
    store = encode_to_store(
        corpus,
        split,
        tokenizer,
        kind="classification",
        make_chunks=partial(labelled_chunks, fields=corpus.fields, max_length=max_length),
        columns={"ids": tokenizer.dtype.str, "ends": "<i8", "labels": "<i4", "second_starts": "<i4"},
        facts={"max_length": max_length, "classes": len(corpus.label_names)},
        options=options,
    )
    return EncodedSplit(store)


class BatchPlan:
    """The rows of each training batch, as a pure function of the seed and the index of the batch.

    Each epoch uses every row once; one batch of an epoch may be smaller than the others. Rows are shuffled,
    then sorted by length within buckets of 128 batches, so that a batch needs little padding. The batches of
    an epoch are shuffled too.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, batch_size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.batch_size, self.seed = batch_size, seed
        if not len(self.lengths):
            raise UsageError("the training split has no rows: use a dataset with at least one row")
        if batch_size < 1:
            raise UsageError(f"batch size must be at least 1, not {batch_size}")
        self.batches_per_epoch = -(-len(self.lengths) // batch_size)
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def batch(self, index: int) -> np.ndarray:
        """Return the row numbers of a batch; `index` counts the batches since the start of training."""
        epoch, position = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._row_order(epoch)
        first = int(shuffled([position], self.batches_per_epoch, self.seed, epoch, 1)[0]) * self.batch_size
        return self._order[first : first + self.batch_size]

    def _row_order(self, epoch: int) -> np.ndarray:
        count = len(self.lengths)
        order = shuffled(np.arange(count), count, self.seed, epoch)
        bucket = np.arange(count) // (self.batch_size * _BUCKET_BATCHES)
        return order[np.lexsort((self.lengths[order], bucket))]

    def padding_share(self, *, pad_to: int = 0) -> float:
        """Return the fraction of tokens in epoch 0 that are padding.

        pad_to: pad all rows to this length; 0 = to the longest row of their batch
        """
        tokens = int(self.lengths.sum())
        if pad_to:
            return 1 - tokens / (len(self.lengths) * max(pad_to, int(self.lengths.max())))
        starts = np.arange(0, len(self.lengths), self.batch_size)
        longest = np.maximum.reduceat(self.lengths[self._row_order(0)], starts)
        return 1 - tokens / int((longest * np.diff(starts, append=len(self.lengths))).sum())


def eval_batches(lengths: Sequence[int] | np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each evaluation batch; every row appears once, sorted by length."""
    order = np.argsort(np.asarray(lengths), kind="stable")
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]
