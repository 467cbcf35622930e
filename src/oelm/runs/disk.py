"""What checkpoints of ended runs take, and freeing it: never a best model, never a result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oelm.runs.folder import RunFolder
from oelm.runs.lock import Busy, RunLock
from oelm.runs.scan import RunInfo, scan, state_of


@dataclass(frozen=True)
class Freeable:
    """A finished run's resume checkpoints: needed to go on, and there is nothing left to go on with."""

    run: RunInfo
    files: tuple[Path, ...]
    bytes: int


def freeable(root: Path | str) -> list[Freeable]:
    found = []
    for run in scan(root):
        if run.state != "finished" or RunFolder(run.path).damage():
            continue  # damaged results can be made again from the checkpoint
        files = RunFolder(run.path).checkpoints
        if files:
            found.append(Freeable(run, files, sum(file.stat().st_size for file in files)))
    return found


def free(items: Iterable[Freeable]) -> int:
    """Remove them; returns the bytes freed. A run that is no longer finished, or locked, is left alone."""
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
