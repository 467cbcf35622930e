"""Pieces of work for the tokenizer: documents of a language model, rows of a classification.

Free of torch, as the child processes of `pool` import this and should start at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from oelm.data.sources.readers import Row, pieces
from oelm.data.tokenize.tokenizers import Tokenizer

_CHARACTERS = 1 << 20  # of text per chunk


@dataclass
class DocumentChunk:
    """Texts, and which of them end a document: a long document comes in several texts."""

    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    characters: int = 0
    whole: bool = True

    def add(self, text: str, ends: bool) -> None:
        self.texts.append(text)
        self.ends.append(ends)
        self.characters += len(text)
        self.bytes += len(text.encode("utf-8"))

    def encode(self, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
        eos = np.array([tokenizer.eos_id], dtype=tokenizer.dtype)
        parts: list[np.ndarray] = []
        ends, length = [], 0
        for ids, last in zip(tokenizer.encode_batch(self.texts), self.ends, strict=True):
            parts.append(ids)
            length += len(ids)
            if last:
                parts.append(eos)
                length += 1
                ends.append(length)
        return {"ids": np.concatenate(parts), "ends": np.array(ends, dtype=np.int64)}


def document_chunks(rows: Iterable[Row], fields: tuple[str, ...]) -> Iterator[DocumentChunk]:
    chunk = DocumentChunk()
    for row in rows:
        text = "\n".join(row[name] for name in fields)
        for piece in pieces(text):
            if chunk.characters > _CHARACTERS:
                yield chunk
                chunk = DocumentChunk()
            chunk.add(piece, ends=False)
            chunk.whole = False
        chunk.ends[-1] = not row.get("continues", False)
        chunk.whole = True
        chunk.rows += 1
    if chunk.texts:
        yield chunk


@dataclass
class LabelledChunk:
    """Texts or pairs with their labels."""

    max_length: int
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    bytes: int = 0
    whole: bool = True

    @property
    def rows(self) -> int:
        return len(self.texts)

    def encode(self, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
        if len(self.texts[0]) == 2:
            rows, seconds = tokenizer.encode_pairs([(a, b) for a, b in self.texts], self.max_length)
        else:
            rows = tokenizer.encode_rows([text for (text,) in self.texts], self.max_length)
            seconds = [len(row) for row in rows]
        return {
            "ids": np.concatenate(rows),
            "ends": np.cumsum([len(row) for row in rows]),
            "labels": np.array(self.labels),
            "seconds": np.array(seconds),
        }


def labelled_chunks(rows: Iterable[Row], fields: tuple[str, ...], max_length: int) -> Iterator[LabelledChunk]:
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
