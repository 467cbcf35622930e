"""The lock of a run folder: only one process works on a run at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oelm.files.locks import Busy, Lock, holder, holder_name, is_locked, keep_inherited_lock, process_alive

__all__ = ["Busy", "RunLock", "is_held", "keep_inherited_lock", "process_alive", "read_holder"]


class RunLock(Lock):
    """`with RunLock(folder): ...`; raises Busy, which names the holder, when another process has the lock.

    `patience`: seconds to keep trying, because `oelm status` holds the lock for an instant to test it.
    """

    def __init__(self, folder: Path | str, patience: float = 1.0) -> None:
        super().__init__(_lock_file(folder), patience)

    def _busy(self) -> str:
        return f"{self.path.parent} is being worked on by {holder_name(self.path)}"


def is_held(folder: Path | str) -> bool:
    """Return whether some process holds the lock of this run."""
    return is_locked(_lock_file(folder))


def read_holder(folder: Path | str) -> dict[str, Any]:
    """Return the record of the process that holds, or last held, the lock; {} when there is none."""
    return holder(_lock_file(folder))


def _lock_file(folder: Path | str) -> Path:
    return Path(folder) / "lock"
