"""Generate the rows of the built-in datasets. No network is needed, and all machines give the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oelm.data.catalogue import SPLITS
from oelm.data.sources.readers import Row
from oelm.data.synthetic.rng import Rng
from oelm.data.synthetic.stories import story
from oelm.data.synthetic.tasks import TASKS
from oelm.errors import unknown_name

SEED = 2026


@dataclass(frozen=True)
class BuiltinCorpus:
    """Sizes and seed of one built-in dataset.

    number:   part of the seed of every row; a different number gives different rows
    version:  part of the hash that identifies the rows in the token cache; increase it whenever the
              generated text changes
    train:    number of train rows
    held_out: number of validation rows, and also of test rows
    """

    number: int
    version: int
    train: int
    held_out: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": self.train, "validation": self.held_out, "test": self.held_out}


CORPORA = {
    "stories": BuiltinCorpus(0, 2, 12_000, 600),
    "stories-2way": BuiltinCorpus(1, 2, 8_000, 1_000),
    "stories-4way": BuiltinCorpus(2, 2, 8_000, 1_000),
    "stories-pairs": BuiltinCorpus(3, 3, 12_000, 1_000),
    "task-copy": BuiltinCorpus(4, 2, 20_000, 500),
    "task-recall": BuiltinCorpus(5, 4, 20_000, 500),
}

_MAKERS: dict[str, Callable[[Rng], Row]] = {"stories": story, **TASKS}


def split_sizes(name: str) -> dict[str, int]:
    """Return {split: number of rows} of the built-in dataset `name`."""
    if name not in CORPORA:
        raise unknown_name("built-in corpus", name, CORPORA)
    return CORPORA[name].sizes


def generator_id(name: str) -> str:
    """Return a text that identifies the generated rows; it is part of the key in the token cache."""
    return f"{name} seed {SEED} version {CORPORA[name].version} sizes {CORPORA[name].sizes}"


def generate_rows(name: str, split: str) -> Iterator[Row]:
    """Yield the rows of a split of a built-in dataset. A row depends only on name, split and row number.

    >>> row = next(generate_rows("stories-2way", "train"))
    >>> sorted(row), row["label"] in (0, 1)
    (['label', 'text'], True)
    """
    for index in range(split_sizes(name)[split]):
        yield _MAKERS[name](Rng(SEED, CORPORA[name].number, SPLITS.index(split), index))
