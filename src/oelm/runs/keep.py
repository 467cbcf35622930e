"""The small files of finished runs, for a repository: what every figure is made of, and no weights or logs.

`oelm archive keep results` copies them to results/<study>/..., laid out like the runs folder, so that
`oelm analyze --runs results` and `oelm report --runs results` read the copy as they read the original.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.errors import OelmError
from oelm.files.atomic import write_json
from oelm.files.read import read_json_object
from oelm.runs.archive import sha256
from oelm.runs.folder import RunFolder
from oelm.runs.scan import scan

ENDED = ("finished", "diverged", "failed", "oom")
JUDGED = (
    "config.yaml",
    "manifest.json",
    "status.json",
    "metrics.jsonl",
    "freeze_audit.json",
    "timing_stats.json",
    "results.json",
    "predictions.json",
)
TRIAL = ("config.yaml", "status.json", "results.json", "timing_stats.json")  # what a rate's choice rests on


@dataclass
class Kept:
    runs: int = 0
    files: int = 0
    bytes: int = 0


def keep(root: Path | str, target: Path | str, *, study: str = "") -> Kept:
    """Copy the ended runs of `root` (of one study, if named) in place of what `target` held of them.

    A run that failed is kept as such: an arm whose bad seeds are left out would look better than it is.
    """
    root, target = Path(root), Path(target)
    if target.resolve().is_relative_to(root.resolve()):
        raise OelmError(f"{target} is the runs folder itself, or in it")
    runs = [run for run in scan(root) if not study or run.study == study]
    ended = [run for run in runs if run.state in ENDED]
    if not any(run.state == "finished" for run in ended):
        raise OelmError(f"no finished runs{f' of study {study}' if study else ''} in {root}")
    integrity = {run.path: RunFolder(run.path).integrity() for run in ended if run.state == "finished"}
    for path, found in integrity.items():
        if found.damaged:
            raise OelmError(f"{path} is not what its run wrote: {'; '.join(found.damaged)}. Run it again.")
    kept = Kept(runs=len(ended))
    for run in ended:
        place = target / run.path.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(place) as fresh:
            for name in TRIAL if run.trial else JUDGED:
                source = run.path / name
                if source.is_file():
                    _copy(source, fresh / name)
            if run.path in integrity and integrity[run.path].verified:
                RunFolder(fresh).write_checksums()  # of the copy, which leaves out some files and host names
            files = [path for path in fresh.iterdir() if path.is_file()]
            kept.files += len(files)
            kept.bytes += sum(path.stat().st_size for path in files)
    return kept


@contextlib.contextmanager
def _replacing(place: Path) -> Iterator[Path]:
    """A new folder that takes the place of `place` when the block ends without an error; until then, and
    whenever it does not, the earlier one stays."""
    fresh, old = (place.with_name(f".{place.name}.{name}") for name in ("new", "old"))
    if old.exists() and not place.exists():
        old.rename(place)  # killed between the two renames below
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        fresh.mkdir()
        yield fresh
        if place.exists():
            place.rename(old)
        fresh.rename(place)
    finally:
        if old.exists() and not place.exists():
            old.rename(place)
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """A file without what was not written for others: a machine's name, a data folder's own notes."""
    content = _read(source) if source.name in ("manifest.json", "status.json") else None
    if content is None:
        shutil.copyfile(source, target)
        if sha256(source) != sha256(target):
            raise OelmError(f"{target}: the copy differs from {source}; is the run still being written?")
        return
    content.pop("host", None)
    if isinstance(machine := content.get("machine"), dict):
        machine.pop("host", None)
    if isinstance(data := content.get("data"), dict):
        data.pop("folder_note", None)
    write_json(target, content)


def _read(path: Path) -> dict[str, Any] | None:
    """None for a damaged file: it is kept as it is, for the analysis to complain of."""
    try:
        return read_json_object(path)
    except OelmError:
        return None
