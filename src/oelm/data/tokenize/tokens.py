"""The tokens of a split for language modelling: one long sequence of documents, each followed by EOS."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import numpy as np

from oelm.data.corpus import Corpus
from oelm.data.tokenize.chunks import document_chunks
from oelm.data.tokenize.encoding import EncodeOptions, encode_to_store
from oelm.data.tokenize.store import Store
from oelm.data.tokenize.tokenizers import Tokenizer


class TokenFile:
    """The tokens of one split. They are memory-mapped, so the file may be larger than the memory.

    ids:     all token ids in order, read-only
    offsets: document i is ids[offsets[i]:offsets[i + 1]], including its EOS
    meta:    dataset, tokenizer, hashes and counts: the content of meta.json
    """

    def __init__(self, store: Store) -> None:
        self.folder = store.folder
        self.meta: dict[str, Any] = store.meta
        self.ids = store["ids"]
        self._ends = store["ends"]

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate((np.zeros(1, dtype=np.int64), self._ends))

    @property
    def documents(self) -> int:
        return len(self._ends)

    def documents_of(self, positions: np.ndarray) -> np.ndarray:
        """Return, for each of `positions`, the number of the document that contains the token there."""
        return np.searchsorted(self._ends, positions, side="right")

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        name = f"{self.meta['dataset']}/{self.meta['split']}"
        return f"TokenFile({name}, {len(self):,} tokens of {self.documents:,} documents)"


def prepare_tokens(
    corpus: Corpus, split: str, tokenizer: Tokenizer, **options: Unpack[EncodeOptions]
) -> TokenFile:
    """Return the tokens of a split, from the cache if the same rows and tokenizer were used before."""
    store = encode_to_store(
        corpus,
        split,
        tokenizer,
        kind="tokens",
        make_chunks=partial(document_chunks, fields=corpus.fields),
        columns={"ids": tokenizer.dtype.str, "ends": "<i8"},
        facts={"layout": "documents"},
        options=options,
    )
    return TokenFile(store)
