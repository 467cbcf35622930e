"""`fit()` trains one run, from its config to its results, and handles every way in which the run can end.

    outcome = fit(config, "runs/paper/GPT-01/scale=mini/seed=42")

The same call resumes a run that was stopped for any reason. The results of the resumed run are bit-identical
to those of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from oelm.config.limits import check_config
from oelm.config.run_config import Machine, RunConfig
from oelm.cores import only_new_garbage
from oelm.errors import OelmError, UsageError
from oelm.runs.folder import RunFolder
from oelm.runs.schema import Status
from oelm.runs.states import DIVERGENCE, EXIT_CODES, EXIT_PERMANENT, State, exit_code_of
from oelm.training.checkpoints.resume import save_training
from oelm.training.determinism import deterministic
from oelm.training.logs.journal import Journal
from oelm.training.loop import finish, train
from oelm.training.measure.disk import storage_failure
from oelm.training.out_of_memory import is_out_of_memory, restart_with_smaller_batches
from oelm.training.parallel.world import make_world
from oelm.training.setup import set_up
from oelm.training.signals import StopRequest
from oelm.training.state import Diverged, Interrupted, Training, TrainingJob


@dataclass(frozen=True)
class Outcome:
    """The state of a run at the end of a call of `fit()`, with the reason."""

    state: State
    reason: str = ""
    permanent: bool = False  # whether the same command will fail again unless the user changes something

    @property
    def exit_code(self) -> int:
        """The exit code of the process, which launchers read."""
        return EXIT_PERMANENT if self.permanent else EXIT_CODES[self.state]


def fit(config: RunConfig, folder: Path | str, machine: Machine = Machine()) -> Outcome:  # noqa: B008
    """Train the run `config` in `folder` until it is finished, interrupted, diverged or failed.

    Run-time failures are returned as an `Outcome`. Invalid user input, such as a folder that contains a run
    with a different config, raises UsageError.
    """
    check_config(config, machine.data_dir)
    if make_world(machine).is_main:
        RunFolder(folder).claim(config)
    return fit_claimed(config, folder, machine)


def fit_claimed(config: RunConfig, folder: Path | str, machine: Machine) -> Outcome:
    """Train like `fit()`, but `config` must be checked already and be in `folder` as config.yaml."""
    run_folder = RunFolder(folder)
    with (
        contextlib.closing(run_folder),
        make_world(machine) as world,
        StopRequest(machine.time_limit) as stop,
        deterministic(world.device),
    ):
        world.barrier()  # the other ranks must not read the folder before rank 0 has written config.yaml
        ended = run_folder.ended()
        if ended is not None:
            return Outcome(ended.state, ended.reason or f"this run had already {ended.state}")
        return _fit(TrainingJob(config, machine, run_folder, world, stop))


def _fit(job: TrainingJob) -> Outcome:
    training: Training | None = None
    try:
        training = set_up(job)
        outcome = _train_and_finish(training)
        _close(training, outcome)
        job.world.wait_before_exit()
        return outcome
    except KeyboardInterrupt:  # a second Ctrl-C: exit now, without a new checkpoint
        reason = "Ctrl-C was pressed twice; run the same command again to resume from the last checkpoint"
        _record_failure(job, training, Outcome("interrupted", reason))
        raise
    except Exception as error:
        outcome = _failure_outcome(error, job, training)
        _record_failure(job, training, outcome, traceback.format_exc())
        is_bug = outcome.state == "failed" and not isinstance(error, OelmError | OSError)
        if isinstance(error, UsageError) or is_bug:
            raise
        return outcome


def _train_and_finish(training: Training) -> Outcome:
    try:
        with only_new_garbage():
            train(training)
            finish(training)
    except Interrupted as stopped:
        # If the run was stopped while it scored the test split, the checkpoint of the last step is already
        # saved. Saving again would be wrong, because the model now has the weights of the best step.
        if not training.is_saved:
            save_training(training)
        step = training.progress.step
        return Outcome("interrupted", f"stopped by {stopped} at step {step}; run the same command to resume")
    except Diverged as error:
        training.event(f"{DIVERGENCE}{error}")
        if training.recorder.metrics is not None:  # the main process; `oelm decide --budget` counts this time
            training.folder.write(training.recorder.timer.stats(training.progress.step))
        return Outcome("diverged", str(error))
    return Outcome("finished")


def _failure_outcome(error: Exception, job: TrainingJob, training: Training | None) -> Outcome:
    if training is not None and restart_with_smaller_batches(training):
        return Outcome(
            "interrupted",
            f"out of memory with micro-batches of {training.micro_rows} rows on {job.world.size} processes; "
            "run the same command again to resume with smaller micro-batches",
        )
    if isinstance(error, Interrupted):
        reason = f"stopped by {error} while preparing the data; run the same command again to continue"
        return Outcome("interrupted", reason)
    if reason := storage_failure(error, job.folder):
        return Outcome("interrupted", reason)
    if is_out_of_memory(error):
        return Outcome("oom", f"out of memory: {error}")
    if isinstance(error, OelmError):
        return Outcome("failed", str(error), permanent=exit_code_of(error) == EXIT_PERMANENT)
    return Outcome("failed", f"{type(error).__name__}: {error}")


def _close(training: Training, outcome: Outcome) -> None:
    training.report_status(force=True, state=outcome.state, reason=outcome.reason)
    training.recorder.close(outcome.state, outcome.reason)


def _record_failure(job: TrainingJob, training: Training | None, outcome: Outcome, trace: str = "") -> None:
    """Write the failure to status.json and training.log, even if set-up failed or the disk is full."""
    job.world.report_failure(outcome.state, outcome.reason)
    if not job.world.is_main:
        return
    try:
        if training is not None:
            _close(training, outcome)
        else:
            last = _last_status(job.folder)
            job.folder.write_status(dataclasses.replace(last, state=outcome.state, reason=outcome.reason))
    except OSError as error:
        message = f"oelm: {outcome.state}: {outcome.reason} (status.json cannot be written: {error})"
        print(message, file=sys.stderr)
    journal = Journal(job.folder.log_file, show=False)
    journal.line(trace or outcome.reason)
    journal.close()


def _last_status(folder: RunFolder) -> Status:
    with contextlib.suppress(OelmError, OSError):
        return folder.status() or Status()
    return Status()
