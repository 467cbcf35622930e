"""Tokenizers: GPT-2's BPE, the tokenizer of a pretrained model, or a small BPE trained on the corpus.

    load_tokenizer("gpt2")                                   from local files, works offline
    load_tokenizer("model", model_folder="path/to/minilm")   the tokenizer of a pretrained model
    load_tokenizer("bpe-1024", corpus=corpus)                trained on the train split, cached
    load_tokenizer("bert-base-uncased")                      from a tokenizers folder, or the hub

For a GPT, a text becomes `text <eos>`, and a pair of texts becomes `first <eos> second <eos>`. A row for a
pretrained encoder has the special tokens of that encoder, for example `[CLS] first [SEP] second [SEP]`.
Truncation shortens the longer text of a pair first and never removes a special token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.data.bad_rows import BadRows
from oelm.data.tokenize.tokenizer_files import (
    adds_tokens_or_spaces,
    bpe_size,
    find_tokenizer_folder,
    gpt2_files,
    special_tokens,
)
from oelm.data.tokenize.words import WordCache, word_pattern
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import write_json, write_text
from oelm.files.read import TOKENIZER_BYTES, read_json_object, read_text

if TYPE_CHECKING:
    import tokenizers

    from oelm.data.corpus import Corpus

EOS = "<|endoftext|>"
_TRAINING_CHARACTERS = 64 << 20  # a BPE tokenizer is trained on this many characters of the corpus
_FILE, _FACTS = "tokenizer.json", "oelm_tokenizer.json"


@dataclass(frozen=True)
class SpecialTokenLayout:
    """The special tokens of a row: prefix, text, suffix; or prefix, first text, middle, second text, end."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    middle: tuple[int, ...]
    end: tuple[int, ...]


class Tokenizer:
    """A Hugging Face tokenizer with known special tokens and a hash of its content.

    hash:   identifies vocabulary, merges, normalisation and special tokens
    eos_id: token at the end of a document, and between the texts of a GPT row
    pad_id: token that pads the rows of a batch; models ignore it because they get the lengths of the rows
    """

    def __init__(self, name: str, inner: tokenizers.Tokenizer, *, eos_id: int, pad_id: int) -> None:
        self.name = name
        self.eos_id = eos_id
        self.pad_id = pad_id
        inner.no_truncation()  # the file of a pretrained tokenizer may enable truncation and padding
        inner.no_padding()
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self._json = inner.to_str()
        facts = json.loads(self._json)
        words = word_pattern(facts)
        self._words = WordCache(words, self._encode_word, self.dtype) if words else None
        self.layout = self._read_layout()
        self.hash = self._digest(facts)

    def _encode_word(self, word: str) -> list[int]:
        return self._inner.encode(word, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        """Return the token ids of one text, without special tokens."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, without special tokens."""
        if self._words is not None:
            return [np.frombuffer(self._words.encode(text), dtype=self.dtype) for text in texts]
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=self.dtype) for one in encoded]

    def encode_rows(self, texts: Sequence[str], max_length: int) -> list[np.ndarray]:
        """Return the token ids of each text, with special tokens, truncated to `max_length` tokens."""
        room = _text_length(max_length, self.layout.prefix, self.layout.suffix)
        prefix, suffix = self._ids(self.layout.prefix), self._ids(self.layout.suffix)
        return [np.concatenate((prefix, ids[:room], suffix)) for ids in self.encode_batch(texts)]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int
    ) -> tuple[list[np.ndarray], list[int]]:
        """Return the token ids of each pair, with special tokens, and the start of each second text."""
        layout = self.layout
        room = _text_length(max_length, layout.prefix, layout.middle, layout.end)
        prefix, middle, end = map(self._ids, (layout.prefix, layout.middle, layout.end))
        encoded = self.encode_batch([text for pair in pairs for text in pair])
        rows, second_starts = [], []
        for first, second in zip(encoded[::2], encoded[1::2], strict=True):
            keep_first, keep_second = longest_first(len(first), len(second), room)
            rows.append(np.concatenate((prefix, first[:keep_first], middle, second[:keep_second], end)))
            second_starts.append(len(prefix) + keep_first + len(middle))
        return rows, second_starts

    def _ids(self, ids: tuple[int, ...]) -> np.ndarray:
        return np.array(ids, dtype=self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the token ids `ids`, including special tokens."""
        return self._inner.decode([int(number) for number in ids], skip_special_tokens=False)

    def _read_layout(self) -> SpecialTokenLayout:
        """Return the layout of the special tokens, found by tokenizing a sample text and a sample pair."""
        one, two = self._inner.encode("a"), self._inner.encode("a", "b")
        if not sum(one.special_tokens_mask):
            eos = (self.eos_id,)
            return SpecialTokenLayout((), eos, eos, eos)
        single = [at for at, sequence in enumerate(one.sequence_ids) if sequence is not None]
        first = [at for at, sequence in enumerate(two.sequence_ids) if sequence == 0]
        second = [at for at, sequence in enumerate(two.sequence_ids) if sequence == 1]
        return SpecialTokenLayout(
            prefix=tuple(one.ids[: single[0]]),
            suffix=tuple(one.ids[single[-1] + 1 :]),
            middle=tuple(two.ids[first[-1] + 1 : second[0]]),
            end=tuple(two.ids[second[-1] + 1 :]),
        )

    def _digest(self, facts: dict[str, Any]) -> str:
        kept = {key: facts.get(key) for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
        kept |= {"eos": self.eos_id, "pad": self.pad_id, "layout": asdict(self.layout)}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write the tokenizer to `folder`, from which `Tokenizer.load()` reads it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / _FILE, self._json)
        facts = {"name": self.name, "eos_id": self.eos_id, "pad_id": self.pad_id, "hash": self.hash}
        write_json(folder / _FACTS, facts)

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Return the tokenizer that `save()` wrote to `folder`, after checking its hash."""
        folder = Path(folder)
        try:
            facts = read_json_object(folder / _FACTS)
            text = read_text(folder / _FILE, max_bytes=TOKENIZER_BYTES)
            loaded = cls.from_json(text, facts)
        except Exception as error:  # the library `tokenizers` raises Exception itself, not a subclass
            raise OelmError(
                f"{folder} contains no valid tokenizer of oelm ({error}): restore the files from a copy"
            ) from error
        if loaded.hash != facts["hash"]:
            raise OelmError(
                f"the tokenizer in {folder} has changed since it was saved (its hash differs): restore the "
                "files from a copy"
            )
        return loaded

    def vocabulary(self) -> dict[str, int]:
        """Return {token: id}, including added tokens."""
        return dict(self._inner.get_vocab())

    def to_json(self) -> tuple[str, dict[str, Any]]:
        """Return the two arguments with which `from_json()` creates an equal tokenizer."""
        return self._json, {"name": self.name, "eos_id": self.eos_id, "pad_id": self.pad_id}

    @classmethod
    def from_json(cls, text: str, facts: dict[str, Any]) -> Tokenizer:
        import tokenizers

        inner = tokenizers.Tokenizer.from_str(text)
        return cls(facts["name"], inner, eos_id=facts["eos_id"], pad_id=facts["pad_id"])

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.vocab_size} tokens, {self.hash[:12]})"


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths of two texts, after removing tokens from the longer text until both fit in `room`.

    >>> longest_first(100, 20, 60), longest_first(50, 50, 61)
    ((40, 20), (31, 30))
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    if first <= second:
        first = min(first, room - shorter) if shorter == first else room - room // 2
        return first, room - first
    second = shorter
    return room - second, second


def _text_length(max_length: int, *special: tuple[int, ...]) -> int:
    """Return how many of `max_length` tokens are left for text after the `special` tokens."""
    length = max_length - sum(map(len, special))
    if length < 2:
        raise UsageError(
            f"data.max_length = {max_length} is too small for text and special tokens: use a larger value"
        )
    return length


def load_tokenizer(
    spec: str,
    *,
    corpus: Corpus | None = None,
    model_folder: Path | str | None = None,
    data_dir: Path | str | None = None,
    cache_dir: Path | str | None = None,
) -> Tokenizer:
    """Return the tokenizer `spec`: "gpt2", "model", "bpe-<vocabulary size>", a folder or a hub repository.

    "model" is the tokenizer in `model_folder`; "bpe-..." is trained on `corpus` unless it is in the cache.
    """
    if spec == "gpt2":
        return _gpt2(data_dir)
    if spec.startswith("bpe-"):
        size = bpe_size(spec)
        if corpus is None:
            raise UsageError(f"tokenizer '{spec}' needs a corpus to be trained on: pass corpus=...")
        return _load_or_train(size, corpus, cache_dir)
    if spec == "model" and not model_folder:
        raise UsageError("tokenizer 'model' needs the folder of a pretrained model: pass model_folder=...")
    wanted = str(model_folder) if spec == "model" else spec
    if (Path(wanted) / _FACTS).is_file():
        return Tokenizer.load(wanted)
    return _from_files(wanted, data_dir)


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    inner = Inner(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _gpt2(data_dir: Path | str | None) -> Tokenizer:
    encoder, merges_file = gpt2_files(data_dir)
    with _name_damaged_folder(encoder.parent):
        vocabulary = json.loads(encoder.read_text(encoding="utf-8"))
        lines = merges_file.read_text(encoding="utf-8").splitlines()
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        inner = _byte_level(vocabulary, merges)  # type: ignore[arg-type]
        # EOS is not a special token: if it were, the characters <|endoftext|> in a text would become EOS.
        return Tokenizer("gpt2", inner, eos_id=vocabulary[EOS], pad_id=vocabulary[EOS])


@contextlib.contextmanager
def _name_damaged_folder(folder: Path) -> Iterator[None]:
    """Raise OelmError for an exception in the `with` block: the tokenizer files in `folder` are damaged."""
    try:
        yield
    except OelmError:
        raise
    except Exception as error:  # the library `tokenizers` raises Exception itself, not a subclass
        raise OelmError(
            f"the tokenizer files in {folder} are damaged ({error}): restore them from their source"
        ) from error


def _load_or_train(size: int, corpus: Corpus, cache_dir: Path | str | None) -> Tokenizer:
    from oelm.data.tokenize.store import cache_root, locked

    folder = cache_root(cache_dir) / "tokenizers" / f"bpe-{size}-{corpus.cache_key('train')[:24]}"
    with locked(folder):
        if (folder / _FACTS).is_file():  # `save()` writes this file last, so the tokenizer is complete
            try:
                return Tokenizer.load(folder)
            except OelmError as error:
                logging.getLogger(__name__).warning("%s. A new tokenizer is trained.", error)
        _train(size, corpus).save(folder)
        return Tokenizer.load(folder)


def _train(size: int, corpus: Corpus) -> Tokenizer:
    from tokenizers import pre_tokenizers, trainers

    inner = _byte_level({}, [])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    inner.train_from_iterator(_training_texts(corpus), trainer)
    # EOS is not a special token: if it were, the characters <|endoftext|> in a text would become EOS.
    model = json.loads(inner.to_str())["model"]
    vocabulary = {**model["vocab"], EOS: len(model["vocab"])}
    inner = _byte_level(vocabulary, [tuple(pair) for pair in model["merges"]])
    return Tokenizer(f"bpe-{size}", inner, eos_id=vocabulary[EOS], pad_id=vocabulary[EOS])


def _training_texts(corpus: Corpus) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for row in corpus.rows("train", BadRows()):
        for name in corpus.fields:
            yield row[name]
            left -= len(row[name])
        if left < 0:
            return


def _from_files(wanted: str, data_dir: Path | str | None) -> Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    folder = find_tokenizer_folder(wanted, data_dir)
    with _name_damaged_folder(folder):
        special, lowercase = special_tokens(folder)
        if (folder / "tokenizer.json").is_file():
            inner = Inner.from_file(str(folder / "tokenizer.json"))
        elif (folder / "vocab.txt").is_file():
            inner = _word_piece(folder, lowercase)
        else:
            if "cls" in special or adds_tokens_or_spaces(folder):
                raise OelmError(
                    f"the tokenizer in {folder} has no tokenizer.json, which says where it adds special "
                    "tokens or spaces: save it again with AutoTokenizer.save_pretrained"
                )
            inner = _byte_level({}, [])
            inner.model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        eos, pad = (_special_id(inner, folder, special, names) for names in (("eos", "sep"), ("pad", "eos")))
        return Tokenizer(Path(wanted).name, inner, eos_id=eos, pad_id=pad)


def _special_id(
    inner: tokenizers.Tokenizer, folder: Path, special: dict[str, str], roles: tuple[str, ...]
) -> int:
    for role in roles:
        number = inner.token_to_id(special[role]) if role in special else None
        if number is not None:
            return number
    known = (inner.token_to_id(token) for token in (EOS, "</s>", "[SEP]"))
    number = next((number for number in known if number is not None), None)
    if number is None:
        raise OelmError(
            f"the tokenizer in {folder} has no {' or '.join(roles)} token: "
            "name one in special_tokens_map.json"
        )
    return number


def _word_piece(folder: Path, lowercase: bool) -> tokenizers.Tokenizer:
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    built = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=lowercase)
    return Tokenizer.from_str(built.to_str())
