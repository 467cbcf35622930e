"""A split as one long line of token ids: what a language model trains on.

Documents follow each other, each ended by EOS, in the corpus' order. The ids are a memory map, so a corpus
may be larger than memory; `ends` says where each document ends.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oelm.data.corpus import Corpus
from oelm.data.tokenize.chunks import document_chunks
from oelm.data.tokenize.encoding import EncodingProgress, OnProgress, encode_to_store
from oelm.data.tokenize.store import Store
from oelm.data.tokenize.tokenizers import Tokenizer

__all__ = ["EncodingProgress", "TokenFile", "prepare_tokens"]


class TokenFile:
    """The tokens of one split.

    ids:     all ids in order, read-only, straight from the disk
    offsets: document i is ids[offsets[i]:offsets[i + 1]], its EOS included
    meta:    the JSON sidecar: dtype, vocabulary, hashes of content and tokenizer, counts
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

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        name = f"{self.meta['dataset']}/{self.meta['split']}"
        return f"TokenFile({name}, {len(self):,} tokens of {self.documents:,} documents)"


def prepare_tokens(
    corpus: Corpus,
    split: str,
    tokenizer: Tokenizer,
    *,
    cache_dir: Path | str | None = None,
    workers: int = 0,
    progress: OnProgress | None = None,
    skip_bad_rows: bool = False,
) -> TokenFile:
    """Tokenise a split, or open it when that has been done for this very content and tokenizer.

    workers:  processes to use; 0 = one per core
    progress: called after each chunk with a `EncodingProgress`
    """
    store = encode_to_store(
        corpus,
        split,
        tokenizer,
        kind="tokens",
        make_chunks=partial(document_chunks, fields=corpus.fields),
        columns={"ids": tokenizer.dtype.str, "ends": "<i8"},
        facts={"layout": "documents"},
        cache_dir=cache_dir,
        workers=workers,
        progress=progress,
        skip_bad_rows=skip_bad_rows,
    )
    return TokenFile(store)
