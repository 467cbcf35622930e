"""The folder best/ of a run: the model with the best validation score, which `oelm.load()` can open.

best/validation.json contains the step and the scores of this validation. If a run is killed after it wrote
best/ and before its next checkpoint, best/ is of a later step than the checkpoint. A run that resumes exactly
writes it again. On a machine with other rounding, that step may not be the best one any more.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from oelm.errors import OelmError
from oelm.files.atomic import write_json
from oelm.files.checksums import find_damage, write_checksums
from oelm.files.read import read_json_object
from oelm.methods.saving.load import load_weights
from oelm.methods.saving.save import save
from oelm.runs.folder import RunFolder
from oelm.training.state import Training

_VALIDATION = "validation.json"


def save_best(training: Training) -> None:
    """Replace the best model in best/ by the current model and tokenizer.

    If the process is killed meanwhile, `recover_best()` restores a complete model: the old or the new one.
    """
    with training.world.full_params_on_rank0(training.prepared.model):
        if training.world.is_main:
            _replace_best(training)


def load_best(training: Training) -> None:
    """Load the weights of best/ into the model on every rank.

    Raise OelmError if a checksum is wrong, or if best/ is of another step than the best validation.
    """
    with training.world.write_params_on_rank0(training.prepared.model):
        if training.world.is_main:
            load_weights(training.prepared.model, training.folder.best)
            if problem := _wrong_step(training.folder, training.progress.best):
                raise OelmError(
                    f"{problem}. The run was killed after it wrote best/, and validated differently when it "
                    f"resumed, so the best weights are lost: delete latest.pt and previous.pt to start the "
                    f"run over"
                )


def repair_best(training: Training) -> None:
    """Write best/ again if it is damaged or of another step, and the current weights are the best so far."""
    p = training.progress
    if p.best is None or p.best["step"] != p.step:
        return
    problem = ""
    if training.world.is_main:
        problem = best_problem(training.folder) or _wrong_step(training.folder, p.best)
    if problem:
        training.recorder.journal.line(f"{problem}; writing it again from the checkpoint")
    if training.world.any(bool(problem)):  # every rank must take part in saving a sharded model
        save_best(training)


def best_problem(folder: RunFolder) -> str:
    """Return why the best model in best/ cannot be read; "" if the model is undamaged."""
    if not folder.best.is_dir():
        return f"{folder.best} is missing"
    damage = find_damage(folder.best)
    problems = ["it has no checksums"] if damage is None else damage.values()
    return f"{folder.best} is damaged ({'; '.join(problems)})" if problems else ""


def best_step_problem(folder: RunFolder, best: dict[str, Any], step: int) -> str:
    """Return why best/ is not the model of the best validation `best`, for a run that resumes at `step`.

    A model of a later step is no problem: the run passes that step again.
    """
    held = _validation(folder)
    return _wrong_step(folder, best) if held is not None and held["step"] <= step else ""


def _wrong_step(folder: RunFolder, best: dict[str, Any] | None) -> str:
    held = _validation(folder)
    if held is None or best is None or held == best:
        return ""
    return (
        f"{folder.best} is the model of step {held['step']}, but the best validation was at step "
        f"{best['step']} (validation losses {held['loss']:.6g} and {best['loss']:.6g})"
    )


def _validation(folder: RunFolder) -> dict[str, Any] | None:
    """Return the step and the scores of the model in best/; None if an older version of oelm wrote it."""
    try:
        return read_json_object(folder.best / _VALIDATION)
    except FileNotFoundError:
        return None


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
        write_json(fresh / _VALIDATION, training.progress.best)
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
