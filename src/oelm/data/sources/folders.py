"""Find the files of a dataset in a local folder.

Two layouts are supported: plain files named after the splits (imdb/train.jsonl), and a copy of the dataset's
Hugging Face repository with its parquet shards (imdb/plain_text/train-00000-of-00001.parquet).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from oelm.data.bad_rows import BadRows
from oelm.data.catalogue import SPLITS, Dataset, Variant, class_name_used_twice
from oelm.data.sources.clean import is_number, label_name
from oelm.data.sources.readers import EXTENSIONS, read_rows
from oelm.errors import OelmError, UsageError
from oelm.files.read import read_json_object

_SHARD = re.compile(r"^(?P<split>.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?$")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
_OTHER_FORMATS = ("json", "ndjson", "arrow", "xlsx", "jsonl.gz", "json.gz", "csv.gz", "tsv.gz", "txt.gz")
_MAX_CLASSES = 1000
_ROWS_DESCRIBED = 1000  # the columns of these rows decide what a user's folder contains


@dataclass
class SplitFiles:
    """The files of each split of a dataset, with notes for the user."""

    folder: Path
    files: dict[str, list[Path]]
    hub_copy: bool = False
    notes: list[str] = field(default_factory=list)
    folder_note: str = ""  # the field "notes" of dataset_info.json, written by the owner of the folder


def dataset_folder(dataset: Dataset, data_dir: Path) -> Path | None:
    """Return the folder in `data_dir` with the name of the dataset or of its hub repository, or None."""
    for name in (dataset.name, dataset.hub.rpartition("/")[2]):
        if name and (data_dir / name).is_dir():
            return data_dir / name
    return None


def find_files(dataset: Dataset, variant: Variant, folder: Path) -> SplitFiles:
    """Return the files of a dataset in `folder`, by split; raise OelmError if there are none."""
    found = _find_plain(dataset, variant, folder) or _find_hub_copy(dataset, variant, folder)
    if found is None:
        names = ", ".join(f"{split}{EXTENSIONS[0]}" for split in SPLITS)
        copy = f"a copy of the hub repository {dataset.hub}" if dataset.hub else ""
        add = f"Add {names} (or {', '.join(EXTENSIONS[1:4])})" + (f", or {copy}" if copy else "")
        if _is_hub_configuration_only(variant):
            add = f"Add {copy} with the folder {variant.config}"
        raise OelmError(f"{folder} has no files of the dataset '{dataset.name}'{_wanted(variant)}. {add}.")
    return found


def _wanted(variant: Variant) -> str:
    return f" for the variant '{variant.about}'" if variant.about else ""


def _is_hub_configuration_only(variant: Variant) -> bool:
    """Return whether no name of a plain file says that the file has this variant."""
    return bool(variant.config) and not variant.stems


def _find_plain(dataset: Dataset, variant: Variant, folder: Path) -> SplitFiles | None:
    if _is_hub_configuration_only(variant):
        return None
    named = {path.stem: path for extension in reversed(EXTENSIONS) for path in folder.glob(f"*{extension}")}
    found = SplitFiles(folder, {})
    for split in SPLITS:
        own = next((stem for stem in variant.stems.get(split, ()) if stem in named), None)
        default = split if split in named and split not in variant.needs else None
        path = named.get(own or default or "")
        if path is None:
            continue
        found.files[split] = [path]
        if own not in (None, split):
            found.notes.append(f"{split} comes from {path.name}")
        elif split in variant.stems and variant.needs:
            content = f" ({dataset.default})" if dataset.default else ""
            found.notes.append(f"{split} comes from {path.name}{content}: no file for {variant.about}")
    missing = [split for split in variant.needs if split not in found.files]
    # Without this error, the missing splits would be taken from the train rows, which are of another variant.
    if missing and set(SPLITS) & set(named):
        names = ", ".join(variant.stems[split][0] + EXTENSIONS[0] for split in missing)
        raise OelmError(
            f"{folder} has no files of the dataset '{dataset.name}' for {variant.about}: add {names}"
        )
    if not found.files:
        return None
    used = {path for paths in found.files.values() for path in paths}
    unused = sorted(p.name for p in folder.iterdir() if p.suffix in EXTENSIONS and p not in used)
    if unused:
        found.notes.append(f"not used: {', '.join(unused)}")
    found.folder_note = str(read_info(folder).get("notes") or "")
    return found


def _find_hub_copy(dataset: Dataset, variant: Variant, folder: Path) -> SplitFiles | None:
    config = variant.config or dataset.config
    hub_splits = {**dataset.hub_splits, **variant.hub_splits} or {split: split for split in SPLITS}
    places = [folder / config, folder, folder / "data", folder / "plain_text"]
    if config != dataset.config:  # files outside the folder of the configuration are of the default variant
        places = places[:1]
    for place in places:
        shards: dict[str, list[Path]] = {}
        for path in sorted(place.glob("*.parquet")):
            match = _SHARD.match(path.stem)
            if match:
                shards.setdefault(match["split"], []).append(path)
        files = {ours: shards[theirs] for ours, theirs in hub_splits.items() if theirs in shards}
        if files:
            if missing := [hub_splits[split] for split in variant.hub_splits if split not in files]:
                raise OelmError(
                    f"{place} has no {' and no '.join(missing)} shards of the dataset '{dataset.name}'"
                    f"{_wanted(variant)}: copy them from the hub repository {dataset.hub}"
                )
            _require_all_shards(files)
            return SplitFiles(place, files, hub_copy=True)
    return None


def _require_all_shards(files: Mapping[str, list[Path]]) -> None:
    for paths in files.values():
        expected = int(paths[0].stem.split("-of-")[1][:5])
        if len(paths) != expected:
            raise OelmError(
                f"{paths[0].parent} has {len(paths)} instead of {expected} shards like {paths[0].name}: "
                "copy the missing files"
            )


def read_info(folder: Path) -> dict[str, object]:
    """Return the content of dataset_info.json in `folder`; {} if the file is missing or unreadable."""
    try:
        return read_json_object(folder / "dataset_info.json")
    except (OelmError, OSError):
        return {}


def dataset_from_path(name: str) -> tuple[Dataset, SplitFiles]:
    """Return a catalogue entry for a dataset in the user's own files, and the files of each split.

    `name` is a folder, or `file:` followed by up to three file names, separated by commas. If the rows have a
    label, the dataset is for classification; if they have two text columns, it is a dataset of pairs.
    """
    paths = [Path(part.strip()).expanduser() for part in name.removeprefix("file:").split(",")]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise UsageError(f"dataset '{name}': {missing} does not exist; correct the path")
    if len(paths) == 1 and paths[0].is_dir():
        stems = {"validation": _SPLIT_WORDS["validation"]}
        found = find_files(Dataset(name=paths[0].name, about=""), Variant(about="", stems=stems), paths[0])
        _require_readable_splits(found)
    else:
        found = SplitFiles(paths[0].parent, _assign_splits(paths))
    if "train" not in found.files:
        raise UsageError(f"dataset '{name}' has no train file in {', '.join(map(str, paths))}: add one")
    return _describe(paths[0], found), found


def _assign_splits(paths: list[Path]) -> dict[str, list[Path]]:
    """Return {split: [file]}, from the file names, or else from their order: train, validation, test.

    Raise UsageError if the names contradict the order, or two files have the name of one split.
    """
    if len(paths) > len(SPLITS):
        raise UsageError(
            f"the dataset has {len(paths)} files, but may have at most three: train, validation and "
            f"test; remove or merge the others"
        )
    named = {path: _split_names(path) for path in paths}
    found = [next(iter(names)) for names in named.values() if len(names) == 1]
    if len(set(found)) == len(paths):
        return dict(zip(found, ([path] for path in paths), strict=True))
    in_order = dict(zip(SPLITS, paths, strict=False))
    if any(named[path] and split not in named[path] for split, path in in_order.items()):
        raise UsageError(
            f"it is not clear which of the files {', '.join(path.name for path in paths)} is the train, the "
            "validation and the test split: rename them, or give them in this order"
        )
    return {split: [path] for split, path in in_order.items()}


def _split_names(path: Path) -> set[str]:
    """Return the splits that words of a file name stand for."""
    words = set(re.findall("[a-z]+", path.stem.lower()))
    return {split for split in SPLITS if words & set(_SPLIT_WORDS[split])}


def _require_readable_splits(found: SplitFiles) -> None:
    """Raise UsageError if a file with the name of a split would not be used.

    It may have a format that is not read, such as test.json, or the split may have another file.
    """
    for path in sorted(found.folder.iterdir()):
        stem, _, extension = path.name.partition(".")
        split = next((split for split, words in _SPLIT_WORDS.items() if stem in words), "")
        if split and f".{extension}" in EXTENSIONS and path not in found.files.get(split, [path]):
            raise UsageError(
                f"{found.folder} has two files of the {split} split, {found.files[split][0].name} and "
                f"{path.name}: keep one of them"
            )
        if split and split not in found.files and extension in _OTHER_FORMATS:
            raise UsageError(
                f"{path} would not be used, although it has the name of the {split} split: convert it to "
                f"one of {', '.join(EXTENSIONS[:5])} (JSON with one object per line is {EXTENSIONS[0]})"
            )


def _describe(path: Path, found: SplitFiles) -> Dataset:
    train = found.files["train"]
    bad = BadRows()
    rows = (row for file in train for _, row in read_rows(file, bad))
    columns = dict.fromkeys(str(key) for row in itertools.islice(rows, _ROWS_DESCRIBED) for key in row)
    if not columns:
        raise bad.error(str(train[0])) if bad else OelmError(f"{train[0]} has no rows")
    aliases = {
        "text": ("text", "sentence", "content", "review", "story", "document", "body"),
        "premise": ("premise", "sentence1", "text1", "question1", "question"),
        "hypothesis": ("hypothesis", "sentence2", "text2", "question2", "answer"),
        "label": ("label", "labels", "class", "category"),
    }
    present = {ours: [n for n in names if n in columns] for ours, names in aliases.items()}
    for ours, names in aliases.items():
        near = [column for column in columns if column.strip().casefold() in names]
        if near and not present[ours]:
            raise OelmError(f"{train[0]}: rename the column '{near[0]}' to '{near[0].strip().casefold()}'")
    pairs = [present[side][0] for side in ("premise", "hypothesis") if present[side]]
    # The columns question and answer often stand beside a text, which is then the text to train on.
    is_pair = len(pairs) == 2 and not (present["text"] and pairs == ["question", "answer"])
    fields = ("premise", "hypothesis") if is_pair else ("text",)
    described = Dataset(name=path.stem, about=f"files in {found.folder}", fields=fields, aliases=aliases)
    if not present["label"]:
        return described
    return replace(described, label_names=_class_names(found, train, present["label"][0]))


def _class_names(found: SplitFiles, train: list[Path], column: str) -> tuple[str, ...]:
    """Return the class names in dataset_info.json; if there are none, the labels in the train files."""
    names = read_info(found.folder).get("label_names")
    if isinstance(names, list) and len(names) > 1:
        given = tuple(str(name) for name in names)
        if twice := class_name_used_twice(given):
            raise OelmError(
                f"{found.folder}: label_names in dataset_info.json has {twice!r} twice; give each class its "
                "own name"
            )
        return given
    seen: dict[str, str] = {}  # the first spelling of each label; case does not distinguish two classes
    has_numbers = False
    for _, row in itertools.chain.from_iterable(read_rows(file, BadRows()) for file in train):
        name = label_name(row.get(column))
        if name:
            seen.setdefault(name.casefold(), name)
            has_numbers = has_numbers or is_number(row[column])
        if len(seen) > _MAX_CLASSES:
            break
    if not 2 <= len(seen) <= _MAX_CLASSES:
        wrong = f"over {_MAX_CLASSES} different values, too many" if seen else "no value, too few"
        wrong = "one value, too few" if len(seen) == 1 else wrong
        raise OelmError(
            f"{train[0]}: '{column}' has {wrong} for a label. Rename the column if it is not the label"
        )
    if all(name.lstrip("-").isdecimal() for name in seen):  # classes 0 to the largest label
        large = [name for name in seen if len(name) > 18 or int(name) >= _MAX_CLASSES]
        if large:
            raise OelmError(
                f"{train[0]}: '{column}' has the number {large[0]:.30}, but whole numbers as labels are the "
                f"classes from 0 to at most {_MAX_CLASSES - 1}: write the labels as names, or renumber them"
            )
        return tuple(str(number) for number in range(max(2, max(map(int, seen)) + 1)))
    if has_numbers or _are_no_classes(seen):
        raise OelmError(
            f"{train[0]}: '{column}' has numbers and names ({', '.join(sorted(seen)[:5])}): write all labels "
            "as names, or all as whole numbers from 0"
        )
    return tuple(sorted(seen.values()))


def _are_no_classes(labels: Iterable[str]) -> bool:
    """Return whether all labels of a CSV file are numbers, but not whole (0.5, nan) or not distinct (1, 1.0).

    JSON and Parquet files have numbers, but CSV files have only text.
    """
    try:
        numbers = [float(label) for label in labels]
    except ValueError:  # a name
        return False
    return len(set(numbers)) < len(numbers) or not all(number.is_integer() for number in numbers)
