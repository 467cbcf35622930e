"""Delete the checkpoints of finished runs to free disk space; best models and results are never deleted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oelm.runs.folder import RunFolder
from oelm.runs.lock import Busy, RunLock
from oelm.runs.scan import RunInfo, scan, state_of


@dataclass(frozen=True)
class Freeable:
    """The checkpoints of a finished run. They can be deleted, because a finished run is never resumed."""

    run: RunInfo
    files: tuple[Path, ...]
    bytes: int


def freeable(root: Path | str) -> list[Freeable]:
    """Return the finished, undamaged runs below `root` that still have checkpoints."""
    found = []
    for run in scan(root):
        if run.state != "finished" or RunFolder(run.path).damage():
            continue  # the checkpoint of a run with damaged files is needed to write these files again
        files = RunFolder(run.path).checkpoints
        if files:
            found.append(Freeable(run, files, sum(file.stat().st_size for file in files)))
    return found


def free(items: Iterable[Freeable]) -> int:
    """Delete the checkpoints of `items`, and return the number of freed bytes.

    A run is skipped if another process has locked it, or if it is not finished any more.
    """
    freed = 0
    for item in items:
        try:
            with RunLock(item.run.path, patience=0):
                if state_of(item.run.path, verify=True)[0] != "finished":
                    continue
                freed += RunFolder(item.run.path).drop_checkpoints()
        except Busy:
            continue
    return freed
