"""One run, one writer: the lock of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oelm.files.locks import Busy, Lock, holder, holder_name, is_locked, keep_inherited_lock, process_alive

__all__ = ["Busy", "RunLock", "is_held", "keep_inherited_lock", "process_alive", "read_holder"]


class RunLock(Lock):
    """`with RunLock(folder): ...`; raises Busy, naming the holder, when another process has it.

    `patience`: seconds to keep trying, since `oelm status` may hold the lock for an instant to look.
    """

    def __init__(self, folder: Path | str, patience: float = 1.0) -> None:
        super().__init__(_lock_file(folder), patience)

    def _busy(self) -> str:
        return f"{self.path.parent} is being worked on by {holder_name(self.path)}"


def is_held(folder: Path | str) -> bool:
    """Whether some process holds the run's lock right now; looks without keeping it."""
    return is_locked(_lock_file(folder))


def read_holder(folder: Path | str) -> dict[str, Any]:
    """The record of who holds (or last held) the lock; {} when there is none."""
    return holder(_lock_file(folder))


def _lock_file(folder: Path | str) -> Path:
    return Path(folder) / "lock"
