"""Show the progress of many runs: a line for each change of state, and on a terminal also a live table."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oelm.cli.output import discard_output, print
from oelm.experiments.launch.jobs import Events, Job
from oelm.printable import printable
from oelm.runs.folder import RunFolder
from oelm.runs.progress import count_text, read_decide_progress
from oelm.runs.scan import state_of
from oelm.units import counted, duration_text

if TYPE_CHECKING:
    from rich.live import Live

    from oelm.config.run_config import RunConfig

_LOG_SECONDS = 30.0
_TABLE_SECONDS = 1.0


class RunProgress:
    """Prints the progress of `total` runs (0 = unknown); with `quiet`, prints nothing to stdout.

    Tuning trials are not in `total`, because their number is unknown until tuning has ended.

    studies: the folders of the studies whose questions `oelm decide` answers
    """

    def __init__(self, total: int, *, quiet: bool = False, studies: Sequence[Path] = ()) -> None:
        self.total, self.quiet, self.studies = total, quiet, studies
        self.ended: set[Path] = set()
        self.live: Live | None = None
        self.last = time.monotonic()
        self.started: dict[Path, float] = {}  # run folder -> start time, for the runs that train now
        self.took: list[tuple[RunConfig, float]] = []  # how many seconds each finished run took

    def __enter__(self) -> RunProgress:
        if not self.quiet and sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(auto_refresh=False, transient=True)  # shows other output above the table
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def events(self) -> Events:
        return Events() if self.quiet else Events(changed=self.changed, tick=self.tick)

    def say(self, text: str) -> None:
        """Print a message to stdout; with --json to stderr, because stdout must contain only JSON."""
        try:
            print(text, file=sys.stderr if self.quiet else sys.stdout, flush=True)
        except BrokenPipeError:  # `oelm run ... | head`: the runs go on
            discard_output()

    def changed(self, job: Job) -> None:
        """Print one line about a run whose state has changed, unless it finished before this command."""
        self.ended |= {job.folder} if job.ended and not job.config.tune.trial else set()
        if job.state == "running":
            self.started[job.folder] = time.monotonic()
        elif start := self.started.pop(job.folder, None):
            self.took += [(job.config, time.monotonic() - start)] if job.state == "finished" else []
        if job.ended_before and job.state == "finished":
            return
        where = f" on {job.slot}" if job.slot else ""
        why = f": {job.reason}" if job.reason and job.state != "finished" else ""
        count = f"  ({len(self.ended)}/{self.total})" if self.total and not job.config.tune.trial else ""
        result = f"{_metric(job)}{count}" if job.ended else ""
        self.say(printable(f"{time.strftime('%H:%M:%S')}  {job.state:11} {job.name}{where}{why}{result}"))

    def tick(self, jobs: Sequence[Job]) -> None:
        """Refresh the live table every second; without a terminal, print a line every 30 seconds instead."""
        if time.monotonic() - self.last < (_LOG_SECONDS if self.live is None else _TABLE_SECONDS):
            return
        self.last = time.monotonic()
        if self.live is None:
            running = "; ".join(f"{name} {step} (ETA {eta})" for name, _, step, _, eta in _rows(jobs))
            self.say(printable(f"{time.strftime('%H:%M:%S')}  {self.stage(jobs)}; {running}"))
            return
        from rich.table import Table
        from rich.text import Text

        table = Table("running", "where", "step", "loss", "ETA", title=Text(self.stage(jobs)), box=None)
        for row in _rows(jobs):
            table.add_row(*(Text(printable(cell)) for cell in row))  # rich would parse a str as markup
        self.live.update(table, refresh=True)

    def stage(self, jobs: Sequence[Job]) -> str:
        """Return what is going on, how far it is, and what is left: questions, tuning trials, runs, time."""
        decide = [str(found) for study in self.studies if (found := read_decide_progress(study))]
        trials, runs = ([job.ended for job in jobs if job.config.tune.trial == t] for t in (True, False))
        tuning = [count_text(trials, runs)] if trials else []
        return "; ".join([*decide, *tuning, counts(jobs), self.left(jobs)])

    def left(self, jobs: Sequence[Job]) -> str:
        """Return how many runs are left and for how long, such as "12 runs left, about 3 h 10 min"."""
        trials = sum(not job.ended and job.config.tune.trial for job in jobs)
        runs = self.total - len(self.ended) if self.total else sum(not job.ended for job in jobs) - trials
        tuning = f"{trials} trials and " if trials else ""
        text = f"{tuning}{counted(runs, 'run')} left" + ("" if self.total else " in this round")
        etas, took, now = [], list(self.took), time.monotonic()
        for job in jobs:
            _, status, _ = state_of(job.folder) if job.state == "running" else ("", None, "")
            if status is not None and status.eta_seconds is not None:
                etas.append(status.eta_seconds)
                took.append((job.config, now - self.started.get(job.folder, now) + status.eta_seconds))
        if not took:
            return text
        waiting = [job.config for job in jobs if not job.ended and job.state != "running"]
        seconds = [_expected_seconds(config, took) for config in waiting]
        # While `oelm run` tunes, the runs after the trials are not among the jobs yet.
        later = max(0, trials + runs - len(self.started) - len(waiting))
        whole_runs = [s for config, s in took if not config.tune.trial] or [s for _, s in took]
        total = sum(etas) + sum(seconds) + later * statistics.fmean(whole_runs)
        return f"{text}, about {duration_text(max([total / max(1, len(self.started)), *etas]))}"


def _expected_seconds(config: RunConfig, took: Sequence[tuple[RunConfig, float]]) -> float:
    """Return how long a run will take, in proportion to its steps.

    took: runs and their seconds; only those of the same experiment count, if there are any
    """
    similar = [run for run in took if run[0].id == config.id] or took
    return statistics.fmean(seconds * _length(config) / _length(other) for other, seconds in similar)


def _length(config: RunConfig) -> int:
    """Return the number of steps of a run, or of epochs if its budget has no steps."""
    return config.budget.steps or config.budget.epochs


def counts(jobs: Sequence[Job]) -> str:
    """Return the number of runs in each state, and how many of them had ended before this command started."""
    found = Counter(job.state for job in jobs)
    earlier = Counter(job.state for job in jobs if job.ended_before)
    before = {state: f" ({n} before)" for state, n in earlier.items()}
    return ", ".join(f"{n} {state}{before.get(state, '')}" for state, n in found.items()) or "none"


def _rows(jobs: Sequence[Job]) -> Iterator[tuple[str, str, str, str, str]]:
    for job in jobs:
        if job.state != "running":
            continue
        _, status, _ = state_of(job.folder)
        if status is None or status.preparing or not status.total_steps:
            data = f" data: {status.preparing}" if status and status.preparing else ""
            yield job.name, job.slot, f"preparing{data}", "-", "-"
            continue
        loss = f"{status.loss:.4f}" if status.loss is not None else "-"
        step = f"{status.step}/{status.total_steps}"
        yield job.name, job.slot, step, loss, duration_text(status.eta_seconds)


def _metric(job: Job) -> str:
    results = RunFolder(job.folder).results() if job.state == "finished" else None
    if not results:
        return ""
    split: Literal["test", "validation"] = "test" if results.test else "validation"
    value = results.score(split)
    return "" if value is None else f"  {split} {results.metric} {value:.4g}"
