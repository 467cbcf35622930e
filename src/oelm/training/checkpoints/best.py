"""The folder best/ of a run: the model with the best validation score, which `oelm.load()` can open."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from oelm.files.checksums import find_damage, write_checksums
from oelm.methods.saving.load import load_weights
from oelm.methods.saving.save import save
from oelm.runs.folder import RunFolder
from oelm.training.state import Training


def save_best(training: Training) -> None:
    """Replace the best model in best/ by the current model and tokenizer.

    If the process is killed meanwhile, `recover_best()` restores a complete model: the old or the new one.
    """
    with training.world.full_params_on_rank0(training.prepared.model):
        if training.world.is_main:
            _replace_best(training)


def load_best(training: Training) -> None:
    """Load the weights of best/ into the model on every rank; raise OelmError if a checksum is wrong."""
    with training.world.write_params_on_rank0(training.prepared.model):
        if training.world.is_main:
            load_weights(training.prepared.model, training.folder.best)


def repair_best(training: Training) -> None:
    """Write best/ again if it is damaged and the current weights have the best validation score so far."""
    p = training.progress
    if p.best is None or p.best["step"] != p.step:
        return
    problem = best_problem(training.folder) if training.world.is_main else ""
    if problem:
        training.recorder.journal.line(f"{problem}; writing it again from the checkpoint")
    if training.world.any(bool(problem)):  # every rank must take part in saving a sharded model
        save_best(training)


def best_problem(folder: RunFolder) -> str:
    """Return why the best model in best/ cannot be used; "" if the model is undamaged."""
    if not folder.best.is_dir():
        return f"{folder.best} is missing"
    damage = find_damage(folder.best)
    problems = ["it has no checksums"] if damage is None else damage.values()
    return f"{folder.best} is damaged ({'; '.join(problems)})" if problems else ""


def recover_best(folder: RunFolder) -> None:
    """Clean up after a process was killed in `save_best()`; restore the old best/ if there is no new one."""
    fresh, old = _temporary_folders(folder)
    if old.exists() and not folder.best.exists():
        old.rename(folder.best)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(fresh, ignore_errors=True)


def _replace_best(training: Training) -> None:
    folder = training.folder
    fresh, old = _temporary_folders(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir()  # without parents=True, because a run folder that was moved must not be created again
        save(training.prepared.model, fresh)
        training.prepared.tokenizer.save(fresh)
        write_checksums(fresh)
        _flush_to_disk(fresh)
    except BaseException:  # the disk may be full: free the space of the incomplete model
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if folder.best.exists():
        folder.best.rename(old)
    fresh.rename(folder.best)
    shutil.rmtree(old, ignore_errors=True)


def _temporary_folders(folder: RunFolder) -> tuple[Path, Path]:
    return folder.path / ".best.new", folder.path / ".best.old"


def _flush_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
