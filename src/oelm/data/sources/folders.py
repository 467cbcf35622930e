"""Find a dataset's files in a local folder: our own plain layout, or a copy of its hub repository.

data/imdb/train.jsonl, test.jsonl            plain: the files are the splits, exactly as they are
data/imdb/plain_text/train-00000-of-00001.parquet      hub copy: the hub's splits, mapped as the hub's are
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from oelm.data.catalogue import SPLITS, Dataset, Variant
from oelm.data.problems import Problems
from oelm.data.sources.readers import EXTENSIONS, read_rows
from oelm.errors import OelmError, UsageError
from oelm.files.read import read_json_object

_SHARD = re.compile(r"^(?P<split>.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?$")
_INFO = "dataset_info.json"
_MOST_CLASSES = 1000


@dataclass
class Found:
    """Files of each split, and what a reader of the results should know about them."""

    folder: Path
    files: dict[str, list[Path]]
    hub_copy: bool = False
    notes: list[str] = field(default_factory=list)
    folder_note: str = ""  # "notes" of dataset_info.json, written by the owner of the folder


def dataset_folder(dataset: Dataset, data_dir: Path) -> Path | None:
    """The dataset's sub-folder under our name or the hub's, if there is one."""
    for name in (dataset.name, dataset.hub.rpartition("/")[2]):
        if name and (data_dir / name).is_dir():
            return data_dir / name
    return None


def find_files(dataset: Dataset, variant: Variant, folder: Path) -> Found:
    """The dataset's files in its own folder; an error when there are none."""
    found = _plain(dataset, variant, folder)
    if not found.files:
        found = _hub_copy(dataset, variant, folder)
    if not found.files:
        wanted = ", ".join(f"{split}{EXTENSIONS[0]}" for split in SPLITS)
        raise OelmError(
            f"{folder} holds no files of '{dataset.name}'. Expected {wanted} "
            f"(or {', '.join(EXTENSIONS[1:4])}), "
            f"or a copy of the hub repository {dataset.hub or 'with its parquet files'}."
        )
    return found


def _plain(dataset: Dataset, variant: Variant, folder: Path) -> Found:
    named = {path.stem: path for extension in reversed(EXTENSIONS) for path in folder.glob(f"*{extension}")}
    found = Found(folder, {})
    for split in SPLITS:
        own = next((stem for stem in variant.stems.get(split, ()) if stem in named), None)
        stem = own or (split if split in named and split not in variant.needs else None)
        if stem is not None:
            found.files[split] = [named[stem]]
        if own is None and stem is not None and split in variant.stems and variant.needs:
            default = f" ({dataset.default})" if dataset.default else ""
            found.notes.append(f"{split} comes from {named[stem].name}{default}: none for {variant.about}")
        elif own is not None:
            found.notes.append(f"{split} comes from {named[own].name}")
    absent = [split for split in variant.needs if split not in found.files]
    if absent and set(SPLITS) & set(named):  # rather than to hold out of another variant's train
        wanted = ", ".join(variant.stems[split][0] + EXTENSIONS[0] for split in absent)
        raise OelmError(
            f"{folder} has '{dataset.name}' but not all of it for {variant.about}: {wanted} missing"
        )
    _note_the_rest(found, folder)
    return found


def _note_the_rest(found: Found, folder: Path) -> None:
    used = {path for paths in found.files.values() for path in paths}
    unused = sorted(p.name for p in folder.iterdir() if p.suffix in EXTENSIONS and p not in used)
    if found.files and unused:
        found.notes.append(f"not used: {', '.join(unused)}")
    info = read_info(folder)
    if found.files and info.get("notes"):
        found.folder_note = str(info["notes"])


def _hub_copy(dataset: Dataset, variant: Variant, folder: Path) -> Found:
    config = variant.config or dataset.config
    wanted = {**dataset.hub_splits, **variant.hub_splits} or {split: split for split in SPLITS}
    for place in (folder / config, folder, folder / "data", folder / "plain_text"):
        shards: dict[str, list[Path]] = {}
        for path in sorted(place.glob("*.parquet")):
            match = _SHARD.match(path.stem)
            if match:
                shards.setdefault(match["split"], []).append(path)
        files = {ours: shards[theirs] for ours, theirs in wanted.items() if theirs in shards}
        if files:
            _require_all_shards(files)
            return Found(place, files, hub_copy=True)
    return Found(folder, {}, hub_copy=True)


def _require_all_shards(files: Mapping[str, list[Path]]) -> None:
    for paths in files.values():
        expected = int(paths[0].stem.split("-of-")[1][:5])
        if len(paths) != expected:
            raise OelmError(
                f"{paths[0].parent}: {len(paths)} of {expected} shards of {paths[0].name} are there"
            )


def read_info(folder: Path) -> dict[str, object]:
    """dataset_info.json of the folder, where there is a readable one."""
    try:
        return read_json_object(folder / _INFO)
    except (OelmError, OSError):
        return {}


def dataset_from_path(name: str) -> tuple[Dataset, Found]:
    """A dataset of the user's own files, its task and classes read from them.

    `name` is a folder, or `file:` and up to three files: train, validation, test, told apart by their names
    where these say it, else by their order. Rows with a label make a classification; two text fields a pair.
    """
    parts = [Path(part.strip()).expanduser() for part in name.removeprefix("file:").split(",")]
    missing = next((part for part in parts if not part.exists()), None)
    if missing is not None:
        raise UsageError(f"dataset '{name}': {missing} does not exist")
    if len(parts) == 1 and parts[0].is_dir():
        bare = Dataset(name=parts[0].name, about="files of the user")
        found = find_files(bare, Variant(about=""), parts[0])
    else:
        found = Found(parts[0].parent, _by_name_or_order(parts))
    if "train" not in found.files:
        raise UsageError(f"dataset '{name}': there is no train file among {', '.join(map(str, parts))}")
    return _describe(parts[0], found), found


def _by_name_or_order(parts: list[Path]) -> dict[str, list[Path]]:
    if len(parts) > len(SPLITS):
        raise UsageError(f"at most three files (train, validation, test), not {len(parts)}")
    words = {"train": "train", "validation": "val", "test": "test"}
    named = {split: [part] for split in SPLITS for part in parts if words[split] in part.stem.lower()}
    return (
        named
        if len(named) == len(parts)
        else {split: [part] for split, part in zip(SPLITS, parts, strict=False)}
    )


def _describe(path: Path, found: Found) -> Dataset:
    train = found.files["train"]
    problems = Problems()
    first = next((row for file in train for _, row in read_rows(file, problems)), None)
    if first is None:
        raise problems.error(str(train[0])) if problems else OelmError(f"{train[0]} has no rows")
    aliases = {
        "text": ("sentence", "content", "review", "story", "document", "body"),
        "premise": ("sentence1", "text1", "question1", "question"),
        "hypothesis": ("sentence2", "text2", "question2", "answer"),
        "label": ("labels", "class", "category"),
    }
    present = {ours: [n for n in (ours, *others) if n in first] for ours, others in aliases.items()}
    fields = ("premise", "hypothesis") if present["premise"] and present["hypothesis"] else ("text",)
    described = Dataset(name=path.stem, about=f"files in {found.folder}", fields=fields, aliases=aliases)
    if not present["label"]:
        return described
    return replace(described, label_names=_classes(found, train, present["label"][0]))


def _classes(found: Found, train: list[Path], key: str) -> tuple[str, ...]:
    """Class names as dataset_info.json has them, else the labels that occur in train."""
    names = read_info(found.folder).get("label_names")
    if isinstance(names, list) and len(names) > 1:
        return tuple(str(name) for name in names)
    seen: set[str] = set()
    for file in train:
        for _, row in read_rows(file, Problems()):
            seen.add(str(row.get(key)))
            if len(seen) > _MOST_CLASSES:
                raise OelmError(f"{file}: over {_MOST_CLASSES} different values in '{key}'; is it a label?")
    numbers = [int(label) for label in seen if label.lstrip("-").isdecimal()]
    if len(numbers) == len(
        seen
    ):  # numbers stay what they are, so that a -1 is found rather than made a class
        return tuple(str(number) for number in range(max(2, max(numbers) + 1)))
    return tuple(sorted(seen))
