"""Compute how much disk space a run needs, and recognise errors of a disk that cannot be written to."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass

import torch
from torch import nn

from oelm.files.atomic import has_errno, is_disk_full
from oelm.runs.folder import DiskFull, RunFolder
from oelm.units import bytes_text

_UNWRITABLE = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENFILE, errno.EMFILE)


@dataclass(frozen=True)
class DiskPlan:
    """The disk space that a run needs. The peak, `total`, is reached while a new file is being written."""

    checkpoint: int  # bytes of one checkpoint
    best: int  # bytes of one saved model

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
    """Return the disk space of a run: its weights, and Adam's two moments of each parameter that ever trains.

    Parameters that the method unfreezes later are in the optimizer from the start.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"])
    slack = 256 * 1024  # bytes for random states, counters and parameter names
    return DiskPlan(checkpoint=weights + 2 * trained + slack, best=weights + slack)


def require_disk(plan: DiskPlan, folder: RunFolder) -> None:
    """Raise DiskFull if the disk has less free space than the run still needs."""
    held = sum(path.stat().st_size for path in folder.checkpoints)
    if folder.best.exists():
        held += sum(path.stat().st_size for path in folder.best.iterdir() if path.is_file())
    needed, free = max(0, plan.total - held), shutil.disk_usage(folder.path).free
    if free < needed:
        raise DiskFull(
            f"disk full: this run needs {bytes_text(needed)} more in {folder.path}, but only "
            f"{bytes_text(free)} are free. Free some space (`oelm clean`) or choose another runs folder."
        )


def storage_failure(error: BaseException, folder: RunFolder) -> str:
    """Return why the run folder cannot be written to; "" if `error` has another cause.

    After such an error, the run counts as interrupted and not as failed, because it can resume from its last
    checkpoint once the user has removed the cause.
    """
    again = "run the same command again to resume from the last checkpoint"
    if isinstance(error, DiskFull):
        return str(error)
    if is_disk_full(error):
        return f"disk full ({error}): free some space or inodes (`oelm clean`), then {again}"
    if not os.path.isdir(folder.path):
        return f"{folder.path} was moved or deleted during the run: put the folder back, then {again}"
    if has_errno(error, *_UNWRITABLE):
        return f"{folder.path} cannot be written to ({error}): make the folder writable again, then {again}"
    return ""
