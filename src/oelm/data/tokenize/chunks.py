"""Chunks of rows to tokenize: documents for a language model, labelled rows for classification.

This module does not import torch, because the worker processes of `oelm.data.tokenize.pool` import it and
must start quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from oelm.data.sources.readers import CONTINUES, Row, pieces
from oelm.data.tokenize.tokenizers import Tokenizer

_CHARACTERS = 1 << 20  # approximate size of a chunk


@dataclass
class DocumentChunk:
    """Documents for language modelling that one call tokenizes. A long document is cut into several texts.

    ends:         for each text, whether a document ends with it
    ends_at_row:  whether a row ends with the last text; tokenizing can be resumed only at the end of a row
    """

    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    characters: int = 0
    ends_at_row: bool = True

    def encode(self, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
        """Return "ids", the token ids of all texts, and "ends": document i ends before ids[ends[i]]."""
        eos = np.array([tokenizer.eos_id], dtype=tokenizer.dtype)
        parts: list[np.ndarray] = []
        ends, length = [], 0
        for ids, is_end in zip(tokenizer.encode_batch(self.texts), self.ends, strict=True):
            parts.append(ids)
            length += len(ids)
            if is_end:
                parts.append(eos)
                length += 1
                ends.append(length)
        return {"ids": np.concatenate(parts), "ends": np.array(ends, dtype=np.int64)}


def document_chunks(rows: Iterable[Row], fields: tuple[str, ...]) -> Iterator[DocumentChunk]:
    """Yield the documents in `rows` as chunks of about `_CHARACTERS` characters."""
    chunk = DocumentChunk()
    for row in rows:
        for piece in pieces("\n".join(row[name] for name in fields)):
            if chunk.characters > _CHARACTERS:
                yield chunk
                chunk = DocumentChunk()
            chunk.texts.append(piece)
            chunk.ends.append(False)
            chunk.characters += len(piece)
            chunk.bytes += len(piece.encode("utf-8"))
            chunk.ends_at_row = False
        chunk.ends[-1] = not row.get(CONTINUES, False)
        chunk.ends_at_row = True
        chunk.rows += 1
    if chunk.texts:
        yield chunk


@dataclass
class LabelledChunk:
    """A group of labelled rows (single texts or pairs of texts) that one call tokenizes."""

    max_length: int
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    bytes: int = 0
    ends_at_row: bool = True

    @property
    def rows(self) -> int:
        return len(self.texts)

    def encode(self, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
        """Return "ids" (the token ids of all rows), "ends", "labels" and "second_starts".

        Row i ends before ids[ends[i]]. second_starts[i] is the position in row i at which the second text of
        a pair starts; for a single text, it is the length of the row.
        """
        if len(self.texts[0]) == 2:
            rows, second_starts = tokenizer.encode_pairs([(a, b) for a, b in self.texts], self.max_length)
        else:
            rows = tokenizer.encode_rows([text for (text,) in self.texts], self.max_length)
            second_starts = [len(row) for row in rows]
        return {
            "ids": np.concatenate(rows),
            "ends": np.cumsum([len(row) for row in rows]),
            "labels": np.array(self.labels),
            "second_starts": np.array(second_starts),
        }


def labelled_chunks(rows: Iterable[Row], fields: tuple[str, ...], max_length: int) -> Iterator[LabelledChunk]:
    """Yield the labelled rows as chunks of about `_CHARACTERS` bytes of text."""
    chunk = LabelledChunk(max_length)
    for row in rows:
        chunk.texts.append(tuple(row[name] for name in fields))
        chunk.labels.append(row["label"])
        chunk.bytes += sum(len(text.encode("utf-8")) for text in chunk.texts[-1])
        if chunk.bytes > _CHARACTERS:
            yield chunk
            chunk = LabelledChunk(max_length)
    if chunk.texts:
        yield chunk


Chunk = DocumentChunk | LabelledChunk
