"""Find and delete the files of ended runs that nothing reads again; results are never deleted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oelm.runs.folder import RunFolder
from oelm.runs.lock import Busy, RunLock
from oelm.runs.scan import RunInfo, scan


@dataclass(frozen=True)
class Freeable:
    """A run that has ended, and its files that nothing reads again (`RunFolder.unneeded_files()`)."""

    run: RunInfo
    files: tuple[Path, ...]
    bytes: int


def freeable(root: Path | str) -> list[Freeable]:
    """Return the runs below `root` that have ended and still have unneeded files."""
    found = []
    for run in scan(root):
        if run.state == "finished" or (run.state == "diverged" and run.trial):
            files = RunFolder(run.path).unneeded_files()
            if files:
                found.append(Freeable(run, files, sum(file.stat().st_size for file in files)))
    return found


def free(items: Iterable[Freeable]) -> int:
    """Delete the unneeded files of `items`, and return the number of freed bytes.

    A run is skipped if another process has locked it, or if it must continue.
    """
    freed = 0
    for item in items:
        try:
            with RunLock(item.run.path, patience=0):
                freed += RunFolder(item.run.path).drop_unneeded_files()
        except Busy:
            continue
    return freed
