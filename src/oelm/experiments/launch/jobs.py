"""`Job`, one run to train, and `Launcher`, the protocol of what trains jobs until they have ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError
from oelm.runs.archives.results_file import SUFFIX
from oelm.runs.folder import RunFolder, changed_questions
from oelm.runs.layout import run_path
from oelm.runs.lock import Busy, RunLock
from oelm.runs.scan import state_of
from oelm.runs.states import EXIT_INTERRUPTED, EXIT_PERMANENT, EXIT_USAGE, is_terminal

RETRIES = 2  # how often a launcher starts a failed run again
# Exit codes of workers after which a retry is useless: the run would fail again until the user changes
# something.
NO_RETRY = frozenset({EXIT_USAGE, EXIT_PERMANENT})


@dataclass
class Job:
    """One run that a launcher starts and watches."""

    config: RunConfig
    folder: Path
    state: str = "pending"
    reason: str = ""
    failures: int = 0
    slot: str = ""  # name of the slot that the run occupies
    ended_before: bool = False  # whether the run had ended before the launcher started

    @property
    def name(self) -> str:
        c = self.config
        trial = f" lr={c.optim.lr:g}" if c.tune.trial else ""
        return f"{c.id} {c.scale}{trial} seed {c.seed}"

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "diverged", "failed")

    def to_dict(self) -> dict[str, Any]:
        """Return what `oelm run --json` and `oelm decide --json` print about the run."""
        c = self.config
        run = {"id": c.id, "seed": c.seed, "scale": c.scale, "trial": c.tune.trial}
        return run | {"state": self.state, "reason": self.reason, "folder": str(self.folder)}


@dataclass
class Events:
    """Callbacks of a launcher: `changed` is called when the state of a job changes, `tick` at each poll."""

    changed: Callable[[Job], None] = lambda job: None
    tick: Callable[[Sequence[Job]], None] = lambda jobs: None


class Launcher(Protocol):
    """A launcher: `launch()` runs jobs until all have ended or the user stops it, and returns them."""

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]: ...


def make_jobs(configs: Iterable[RunConfig], root: Path | str, *, retry_diverged: bool = False) -> list[Job]:
    """Return one job per config, and create the run folder of each below `root`.

    Raises the errors of `check_folders()`, before a folder is created.

    retry_diverged: let diverged runs continue from their last checkpoint, except tuning trials, because
        divergence is a valid result of a trial
    """
    configs = list(configs)
    check_folders(configs, root)
    jobs = []
    for config in configs:
        folder = RunFolder(run_path(root, config))
        folder.claim(config)
        if retry_diverged and not config.tune.trial:
            _reopen_diverged(folder)
        jobs.append(Job(config, folder.path))
    return jobs


def check_folders(configs: Sequence[RunConfig], root: Path | str) -> None:
    """Raise UsageError if the runs cannot be trained in their folders below `root`. Nothing is written.

    A run folder already contains a different config, a config does not fit the other seeds of its arm
    (`_check_other_seeds()`), or `root` has a results file of the study: its runs are not in run folders, so
    they would be trained again.
    """
    refuse_results_files(root, (config.study for config in configs))
    arms: dict[Path, list[RunConfig]] = {}
    for config in configs:
        if not config.tune.trial:
            arms.setdefault(run_path(root, config).parent, []).append(config)
    for place, seeds in arms.items():
        _check_other_seeds(place, seeds)
    for config in configs:
        RunFolder(run_path(root, config)).check_claim(config)


def _check_other_seeds(place: Path, configs: Sequence[RunConfig]) -> None:
    """Raise UsageError if new seeds of an arm would change what its existing runs in `place` answer.

    They have different questions, or they come before the seeds that `oelm decide` has looked at.
    """
    started: dict[int, RunConfig] = {}
    for folder in map(RunFolder, place.glob("seed=*")):
        with contextlib.suppress(OelmError, OSError):  # a damaged config is an error when its run is claimed
            if not folder.failed_before_first_step():
                started[folder.config().seed] = folder.config()
    id, asked = configs[0].id, configs[0].compare.questions
    if any(config.compare.questions != asked for config in started.values()):
        raise changed_questions(id, place)
    last = max(started, default=-1)
    new = {c.seed for c in configs if not c.compare.max_seeds} - started.keys()
    if new and min(new) < last and any(c.compare.max_seeds for c in started.values()):
        raise UsageError(
            f"seed {min(new)} of {id} is new, but `oelm decide` uses the seeds in ascending order and has "
            f"already used {last}: a smaller one would change its results. Use seeds above {last}, or "
            "store new runs under a different study name with --as NAME"
        )


def refuse_results_files(root: Path | str, studies: Iterable[str]) -> None:
    """Raise UsageError if `root` has a results file (`oelm archive keep`) of one of the studies."""
    for file in (Path(root) / f"{study}{SUFFIX}" for study in dict.fromkeys(studies)):
        if file.exists():
            raise UsageError(
                f"{root} contains results without run folders, {file.name}. To continue the study, make run "
                f"folders in another folder: oelm archive merge {file} --runs DIR, then use --runs DIR"
            )


def _reopen_diverged(folder: RunFolder) -> None:
    """Mark a diverged run as interrupted, so that it continues from its last checkpoint."""
    if state_of(folder.path)[0] != "diverged":
        return
    with contextlib.suppress(Busy), RunLock(folder.path):
        status = folder.status()
        if status is not None and status.state == "diverged":
            reason = f"will be retried after it diverged: {status.reason}"
            folder.write_status(replace(status, state="interrupted", reason=reason))


def skip_if_ended(job: Job, events: Events) -> bool:
    """Return whether the run of a job has ended already, and if so, set the state of the job.

    The run's files are compared with their checksums; a run with a damaged file counts as not ended.
    """
    state, status, _ = state_of(job.folder, verify=True)
    job.ended_before = is_terminal(state)
    if job.ended_before:
        job.state, job.reason = state, status.reason if status else ""
        events.changed(job)
    return job.ended_before


def exit_code(jobs: Sequence[Job]) -> int:
    """Return the exit code of a command that ran these jobs.

    It is 0 if all jobs finished, 1 if at least one failed or diverged, and 75 if some jobs are not finished
    and the same command would continue them. A tuning trial that diverged counts as finished.
    """
    states = {job.state for job in jobs if not (job.state == "diverged" and job.config.tune.trial)}
    if states & {"failed", "diverged"}:
        return 1
    return 0 if states <= {"finished"} else EXIT_INTERRUPTED
