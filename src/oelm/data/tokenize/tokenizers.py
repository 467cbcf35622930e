"""Text to ids: GPT-2's BPE without a network, a pretrained model's own, or a small BPE trained here.

    load_tokenizer("gpt2")                                   official ids, from files found offline
    load_tokenizer("model", model_folder="path/to/minilm")   the pretrained model's own
    load_tokenizer("bpe-1024", corpus=corpus)                trained on the corpus' train split, cached
    load_tokenizer("bert-base-uncased")                      a folder among the tokenizers, or the hub

How rows are laid out. A GPT-type row is `text <eos>`, a pair `first <eos> second <eos>`: the end token
separates, and is the last valid token that a classifier reads. A pretrained encoder's row has its own special
tokens ([CLS] first [SEP] second [SEP]). Truncation is longest-first and never takes a special token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oelm.data.tokenize.tokenizer_files import bpe_size, find_files, gpt2_files, special_tokens
from oelm.data.tokenize.words import WordCache, word_pattern
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import write_json, write_text
from oelm.files.read import TOKENIZER_BYTES, read_json_object, read_text

if TYPE_CHECKING:
    import tokenizers

    from oelm.data.corpus import Corpus

EOS = "<|endoftext|>"
_TRAINING_BYTES = 64 << 20  # a small vocabulary does not change with more text than this
_FILE, _FACTS = "tokenizer.json", "oelm_tokenizer.json"


@dataclass(frozen=True)
class Layout:
    """Special tokens around one text (prefix, suffix) and around two (prefix, middle, end)."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    middle: tuple[int, ...]
    end: tuple[int, ...]


class Tokenizer:
    """A `tokenizers.Tokenizer` with what training needs to know about it.

    hash:   identifies vocabulary, merges and normalisation, wherever the files came from
    eos_id: ends a document of a language model, and separates and ends a GPT-type row
    pad_id: fills batches; never read, as lengths say where rows end
    """

    def __init__(self, name: str, inner: tokenizers.Tokenizer, *, eos_id: int, pad_id: int) -> None:
        self.name = name
        self.eos_id = eos_id
        self.pad_id = pad_id
        inner.no_truncation()  # files of pretrained models often carry a truncation and a padding
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
        """Ids of one text, without special tokens."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without special tokens."""
        if self._words is not None:
            return [np.frombuffer(self._words.encode(text), dtype=self.dtype) for text in texts]
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=self.dtype) for one in encoded]

    def encode_rows(self, texts: Sequence[str], max_length: int) -> list[np.ndarray]:
        """Classification rows of single texts: special tokens added, cut to `max_length`."""
        room = max_length - len(self.layout.prefix) - len(self.layout.suffix)
        _require_room(room, max_length)
        prefix, suffix = self._ids(self.layout.prefix), self._ids(self.layout.suffix)
        return [np.concatenate((prefix, ids[:room], suffix)) for ids in self.encode_batch(texts)]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int
    ) -> tuple[list[np.ndarray], list[int]]:
        """Classification rows of pairs, cut longest-first, and where the second text begins in each."""
        layout = self.layout
        room = max_length - len(layout.prefix) - len(layout.middle) - len(layout.end)
        _require_room(room, max_length)
        prefix, middle, end = map(self._ids, (layout.prefix, layout.middle, layout.end))
        encoded = self.encode_batch([text for pair in pairs for text in pair])
        rows, seconds = [], []
        for first, second in zip(encoded[::2], encoded[1::2], strict=True):
            keep_first, keep_second = longest_first(len(first), len(second), room)
            rows.append(np.concatenate((prefix, first[:keep_first], middle, second[:keep_second], end)))
            seconds.append(len(prefix) + keep_first + len(middle))
        return rows, seconds

    def _ids(self, ids: tuple[int, ...]) -> np.ndarray:
        return np.array(ids, dtype=self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids, special tokens included as they are written."""
        return self._inner.decode([int(number) for number in ids], skip_special_tokens=False)

    def _read_layout(self) -> Layout:
        """Ask the tokenizer itself where it puts its special tokens."""
        one, two = self._inner.encode("a"), self._inner.encode("a", "b")
        if not sum(one.special_tokens_mask):
            eos = (self.eos_id,)
            return Layout((), eos, eos, eos)
        single = [at for at, sequence in enumerate(one.sequence_ids) if sequence is not None]
        first = [at for at, sequence in enumerate(two.sequence_ids) if sequence == 0]
        second = [at for at, sequence in enumerate(two.sequence_ids) if sequence == 1]
        return Layout(
            prefix=tuple(one.ids[: single[0]]),
            suffix=tuple(one.ids[single[-1] + 1 :]),
            middle=tuple(two.ids[first[-1] + 1 : second[0]]),
            end=tuple(two.ids[second[-1] + 1 :]),
        )

    def _digest(self, facts: dict[str, Any]) -> str:
        kept = {key: facts.get(key) for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
        kept |= {"eos": self.eos_id, "pad": self.pad_id, "layout": repr(self.layout)}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write it to a folder that `Tokenizer.load` and other programs read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / _FILE, self._json)
        facts = {"name": self.name, "eos_id": self.eos_id, "pad_id": self.pad_id, "hash": self.hash}
        write_json(folder / _FACTS, facts)

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """What `save` wrote; its hash is checked."""
        folder = Path(folder)
        try:
            facts = read_json_object(folder / _FACTS)
            text = read_text(folder / _FILE, max_bytes=TOKENIZER_BYTES)
            loaded = cls.from_json(text, facts)
        except Exception as error:  # the library's own errors are plain Exceptions
            raise OelmError(
                f"{folder} holds no tokenizer saved by oelm, or a damaged one ({error})"
            ) from error
        if loaded.hash != facts["hash"]:
            raise OelmError(
                f"the tokenizer in {folder} is not the one that was saved there: its hash differs"
            )
        return loaded

    def to_json(self) -> tuple[str, dict[str, Any]]:
        """Everything needed to make it again elsewhere, as `from_json` takes it."""
        return self._json, {"name": self.name, "eos_id": self.eos_id, "pad_id": self.pad_id}

    @classmethod
    def from_json(cls, text: str, facts: dict[str, Any]) -> Tokenizer:
        import tokenizers

        inner = tokenizers.Tokenizer.from_str(text)
        return cls(facts["name"], inner, eos_id=facts["eos_id"], pad_id=facts["pad_id"])

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, {self.vocab_size} tokens, {self.hash[:12]})"


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two lengths stays when tokens are taken from the longer one until both fit.

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


def _require_room(room: int, max_length: int) -> None:
    if room < 2:
        raise UsageError(f"max_length {max_length} leaves no room for text beside the special tokens")


def load_tokenizer(
    spec: str,
    *,
    corpus: Corpus | None = None,
    model_folder: Path | str | None = None,
    data_dir: Path | str | None = None,
    cache_dir: Path | str | None = None,
) -> Tokenizer:
    """The tokenizer that `spec` names: "gpt2", "model", "bpe-<vocabulary size>", a name or a folder."""
    if spec == "gpt2":
        return _gpt2(data_dir)
    if spec.startswith("bpe-"):
        size = bpe_size(spec)
        if corpus is None:
            raise UsageError(f"tokenizer '{spec}' is trained on a corpus: pass corpus=")
        return _trained(size, corpus, cache_dir)
    if spec == "model" and not model_folder:
        raise UsageError("tokenizer 'model' is the pretrained model's own: there must be one (model_folder=)")
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
    with _naming_damage(encoder.parent):
        vocabulary = json.loads(encoder.read_text(encoding="utf-8"))
        lines = merges_file.read_text(encoding="utf-8").splitlines()
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        inner = _byte_level(vocabulary, merges)  # type: ignore[arg-type]
        # <|endoftext|> stays out of the special tokens: no text can spell it, only a document's end is one.
        return Tokenizer("gpt2", inner, eos_id=vocabulary[EOS], pad_id=vocabulary[EOS])


@contextlib.contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    """Name the folder of tokenizer files that cannot be read, whatever the library makes of them."""
    try:
        yield
    except OelmError:
        raise
    except Exception as error:  # the library's own errors are plain Exceptions
        raise OelmError(
            f"the tokenizer files in {folder} are damaged ({error}): put them back from their source"
        ) from error


def _trained(size: int, corpus: Corpus, cache_dir: Path | str | None) -> Tokenizer:
    from oelm.data.tokenize.store import cache_root, locked

    folder = cache_root(cache_dir) / "tokenizers" / f"bpe-{size}-{corpus.fingerprint('train')[:24]}"
    with locked(folder):
        if (folder / _FACTS).is_file():  # written last
            try:
                return Tokenizer.load(folder)
            except OelmError as error:
                logging.getLogger(__name__).warning("%s. It is trained again.", error)
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
    # The end token goes in by hand: as a "special" token it could be spelled by a text.
    model = json.loads(inner.to_str())["model"]
    vocabulary = {**model["vocab"], EOS: len(model["vocab"])}
    inner = _byte_level(vocabulary, [tuple(pair) for pair in model["merges"]])
    return Tokenizer(f"bpe-{size}", inner, eos_id=vocabulary[EOS], pad_id=vocabulary[EOS])


def _training_texts(corpus: Corpus) -> Iterator[str]:
    from oelm.data.problems import Problems

    left = _TRAINING_BYTES
    for row in corpus.rows("train", Problems()):
        for name in corpus.fields:
            yield row[name]
            left -= len(row[name])
        if left < 0:
            return


def _from_files(wanted: str, data_dir: Path | str | None) -> Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    folder = find_files(wanted, data_dir)
    with _naming_damage(folder):
        special = special_tokens(folder)
        if (folder / "tokenizer.json").is_file():
            inner = Inner.from_file(str(folder / "tokenizer.json"))
        elif (folder / "vocab.txt").is_file():
            inner = _word_piece(folder, special)
        else:
            inner = _byte_level({}, [])
            inner.model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        eos, pad = (_id(inner, folder, special, names) for names in (("eos", "sep"), ("pad", "eos")))
        return Tokenizer(Path(wanted).name, inner, eos_id=eos, pad_id=pad)


def _id(inner: tokenizers.Tokenizer, folder: Path, special: dict[str, str], roles: tuple[str, ...]) -> int:
    for role in roles:
        number = inner.token_to_id(special[role]) if role in special else None
        if number is not None:
            return number
    known = (inner.token_to_id(token) for token in (EOS, "</s>", "[SEP]"))
    number = next((number for number in known if number is not None), None)
    if number is None:
        raise OelmError(f"{folder}: no {' or '.join(roles)} token is named in special_tokens_map.json")
    return number


def _word_piece(folder: Path, special: dict[str, str]) -> tokenizers.Tokenizer:
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    lower = special.get("lowercase", "true") == "true"
    built = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=lower)
    return Tokenizer.from_str(built.to_str())
