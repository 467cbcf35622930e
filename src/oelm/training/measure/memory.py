"""Running out of memory or disk: how it is recognised, and how much of both a run will take."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass

import torch
from torch import nn

from oelm.errors import OelmError
from oelm.files.atomic import is_disk_full
from oelm.runs.folder import DiskFull, RunFolder
from oelm.units import bytes_text

# What torch's CPU allocator says; it has no exception of its own.
_CPU_WORDS = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc")


class OutOfMemory(OelmError):
    """It ran out where beginning again with smaller micro-batches is no help; the message says why."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)


@dataclass(frozen=True)
class DiskPlan:
    """Bytes a run keeps on disk at most, while a checkpoint or the best model is being written."""

    checkpoint: int
    best: int

    @property
    def total(self) -> int:
        return 3 * self.checkpoint + 2 * self.best

    def __str__(self) -> str:
        return (
            f"disk: at most {bytes_text(self.total)} (3 checkpoints of {bytes_text(self.checkpoint)}: "
            f"latest, previous, one being written; 2 models of {bytes_text(self.best)}: "
            "best, one being written)"
        )


def disk_plan(model: nn.Module, optimizer: torch.optim.Optimizer) -> DiskPlan:
    """Weights, and Adam's two moments of what trains; frozen tensors have none."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(
        p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"] if p.requires_grad
    )
    slack = 256 * 1024  # random states, counters, names
    return DiskPlan(checkpoint=weights + 2 * trained + slack, best=weights + slack)


def require_disk(plan: DiskPlan, folder: RunFolder) -> None:
    """Refuse to start what the disk cannot hold."""
    held = sum(path.stat().st_size for path in folder.checkpoints)
    if folder.best.exists():
        held += sum(path.stat().st_size for path in folder.best.iterdir() if path.is_file())
    needed, free = max(0, plan.total - held), shutil.disk_usage(folder.path).free
    if free < needed:
        raise DiskFull(
            f"disk full: this run needs {bytes_text(needed)} more in {folder.path}, {bytes_text(free)} are "
            "free. Free some space (oelm clean) or choose another runs folder."
        )


def storage_failure(error: BaseException, folder: RunFolder) -> str:
    """Why the run folder can no longer be written, if that is what `error` comes from; "" otherwise.

    None of this is the run's fault: it goes on from its last checkpoint once the cause is gone.
    """
    again = "run the same command again to go on from the last checkpoint"
    if isinstance(error, DiskFull):
        return str(error)
    if is_disk_full(error):
        return f"disk full ({error}): free some space or inodes (oelm clean), then {again}"
    if not os.path.isdir(folder.path):
        return f"{folder.path} was moved or removed while the run was going on: put it back, then {again}"
    if any(_is_system_error(error, number) for number in _UNWRITABLE):
        return f"{folder.path} cannot be written ({error}): {again} once that is repaired"
    return ""


_UNWRITABLE = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENFILE, errno.EMFILE)


def _is_system_error(error: BaseException, number: int) -> bool:
    """Also when a library that is not written in Python only passes on the system's text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == number
    return os.strerror(number) in str(error)
