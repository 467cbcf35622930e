"""How far a study is: data preparation, tuning trials, runs, and the questions of `oelm decide`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oelm.errors import OelmError
from oelm.files.atomic import write_json
from oelm.files.read import read_json
from oelm.runs.scan import RunInfo
from oelm.runs.schema import from_json, to_json
from oelm.runs.states import is_terminal
from oelm.units import counted, duration_text

_FILE = ".decide.json"  # in the folder of the study


@dataclass(frozen=True)
class DecideProgress:
    """The questions of a study at the last look of `oelm decide`."""

    questions: int = 0
    decided: int = 0
    open: int = 0  # the others were given up

    def __str__(self) -> str:
        given_up = self.questions - self.decided - self.open
        parts = [f"{self.decided} of {counted(self.questions, 'question')} decided"]
        parts += [f"{given_up} given up"] if given_up else []
        return ", ".join([*parts, *([f"{self.open} open"] if self.open else [])])


def write_decide_progress(study: Path, progress: DecideProgress) -> None:
    """Write the progress of `oelm decide` to the folder of a study."""
    study.mkdir(parents=True, exist_ok=True)
    write_json(study / _FILE, to_json(progress))


def read_decide_progress(study: Path) -> DecideProgress | None:
    """Return the progress of `oelm decide` in the folder of a study; None if it never worked on the study."""
    try:
        return from_json(DecideProgress, read_json(study / _FILE), str(study / _FILE))
    except (OSError, OelmError):  # the file only informs, so a damaged one is no reason to stop
        return None


def count_text(trials: Sequence[bool], runs: Sequence[bool]) -> str:
    """Return how many tuning trials and runs have ended; each argument has, per run, whether it has ended.

    >>> count_text([True, False], [False, False, False])
    'tuning: 1 of 2 trials ended; runs: 0 of 3 ended'
    """
    parts = [f"tuning: {sum(trials)} of {len(trials)} trials ended"] if trials else []
    parts += [f"runs: {sum(runs)} of {len(runs)} ended"] if runs else []
    return "; ".join(parts)


def study_progress(root: Path, study: str, runs: Sequence[RunInfo]) -> str:
    """Return one line about a study: what is going on, how far it is, and how much time is left.

    runs: the runs of the study, including tuning trials
    """
    preparing = [r.status.preparing for r in runs if r.state == "running" and r.status and r.status.preparing]
    parts = [f"preparing data: {', '.join(dict.fromkeys(preparing))}"] if preparing else []
    trials, others = ([is_terminal(r.state) for r in runs if bool(r.trial) == wanted] for wanted in (1, 0))
    parts.append(count_text(trials, others))
    if decide := read_decide_progress(root / study):
        parts.append(str(decide))
    if left := seconds_left(runs):
        parts.append(f"about {duration_text(left)} left")
    return f"{study}: {'; '.join(parts)}"


def seconds_left(runs: Iterable[RunInfo]) -> float | None:
    """Return the time until all runs have finished at the present speed, or None if none is running.

    This assumes that runs that have not started are as long as the running ones, and that as many runs as now
    train at the same time.
    """
    runs = list(runs)
    active = [run.status for run in runs if run.state == "running" and run.status]
    left = [status.eta_seconds for status in active if status.eta_seconds is not None]
    speeds = [status.steps_per_second for status in active if status.steps_per_second]
    if not left or not speeds:
        return None
    usual = sum(status.total_steps for status in active) / len(active)
    later = [run.status for run in runs if run.state in ("queued", "interrupted", "pending")]
    steps = sum(usual if status is None else status.total_steps - status.step for status in later)
    seconds = (sum(left) + steps / (sum(speeds) / len(speeds))) / len(active)
    return max(seconds, *left)
