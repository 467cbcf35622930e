"""The lock of a run folder. It ensures that only one process at a time works on a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oelm.files.locks import Busy, Lock, holder, holder_name, is_locked

__all__ = ["Busy", "RunLock", "is_held", "read_holder"]


class RunLock(Lock):
    """A context manager that holds the lock of a run folder; it raises `Busy` if another process holds it.

    `patience` is how many seconds to keep trying. It should not be 0 if `oelm status` may run at the same
    time, because that command takes the lock for an instant to test whether a process holds it.
    """

    def __init__(self, folder: Path | str, patience: float = 1.0) -> None:
        super().__init__(_lock_file(folder), patience)

    def _busy(self) -> str:
        return f"{self.path.parent} is in use by {holder_name(self.path)}"


def is_held(folder: Path | str) -> bool:
    """Return whether a process holds the lock of the run in `folder`."""
    return is_locked(_lock_file(folder))


def read_holder(folder: Path | str) -> dict[str, Any]:
    """Return host and pid of the process that holds or last held the lock of a run; {} if unknown."""
    return holder(_lock_file(folder))


def _lock_file(folder: Path | str) -> Path:
    return Path(folder) / "lock"
