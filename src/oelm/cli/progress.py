"""Progress of `oelm run`: a live table on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from oelm.experiments.launch.jobs import Events, Job
from oelm.printable import printable
from oelm.runs.folder import RunFolder
from oelm.runs.scan import state_of
from oelm.units import duration_text

_PLAIN_SECONDS = 30.0
_LIVE_SECONDS = 1.0


def say(text: str) -> None:
    print(printable(text, lines=True), flush=True)


@contextlib.contextmanager
def show_progress(quiet: bool = False) -> Iterator[Events]:
    """Event handlers for a launcher that print its progress; `quiet` (for --json) prints nothing."""
    if quiet:
        yield Events()
    elif sys.stdout.isatty():
        with _LiveTable() as live:
            yield Events(changed=print_change, tick=live.tick)
    else:
        yield Events(changed=print_change, tick=_PlainLines().tick)


def print_change(job: Job) -> None:
    """Print one line for a change of a run's state, but none for a run that had finished before."""
    if job.ended_before and job.state == "finished":
        return
    where = f" on {job.slot}" if job.slot else ""
    why = f": {job.reason}" if job.reason and job.state != "finished" else ""
    metric = _metric(job) if job.state == "finished" else ""
    say(printable(f"{time.strftime('%H:%M:%S')}  {job.state:11} {job.name}{where}{why}{metric}"))


def counts(jobs: Sequence[Job]) -> str:
    """The number of runs in each state, and how many of them had reached it before this command."""
    found = Counter(job.state for job in jobs)
    earlier = Counter(job.state for job in jobs if job.ended_before)
    before = {state: f" ({n} before)" for state, n in earlier.items()}
    return ", ".join(f"{n} {state}{before.get(state, '')}" for state, n in found.items()) or "none"


class _PlainLines:
    """Prints a line of progress every 30 seconds, for logs."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def tick(self, jobs: Sequence[Job]) -> None:
        if time.monotonic() - self.last < _PLAIN_SECONDS:
            return
        self.last = time.monotonic()
        going = [f"{row[0]} {row[2]} (ETA {row[4]})" for row in _rows(jobs)]
        say(printable(f"{time.strftime('%H:%M:%S')}  {counts(jobs)}; {'; '.join(going)}"))


class _LiveTable:
    """A table of the running jobs, below the lines that were printed."""

    def __init__(self) -> None:
        from rich.live import Live

        self.live = Live(auto_refresh=False, transient=True)  # printed lines appear above it
        self.last = 0.0

    def __enter__(self) -> _LiveTable:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def tick(self, jobs: Sequence[Job]) -> None:
        if time.monotonic() - self.last < _LIVE_SECONDS:
            return
        from rich.table import Table
        from rich.text import Text

        self.last = time.monotonic()
        table = Table("running", "where", "step", "loss", "ETA", title=Text(counts(jobs)), box=None)
        for row in _rows(jobs):
            table.add_row(*(Text(printable(cell)) for cell in row))  # rich parses a str as markup
        self.live.update(table, refresh=True)


def _rows(jobs: Sequence[Job]) -> Iterator[tuple[str, str, str, str, str]]:
    for job in jobs:
        if job.state != "running":
            continue
        _, status, _ = state_of(job.folder)
        if status is None or not status.total_steps:
            yield job.name, job.slot, "preparing", "-", "-"
            continue
        loss = f"{status.loss:.4f}" if status.loss is not None else "-"
        step = f"{status.step}/{status.total_steps}"
        yield job.name, job.slot, step, loss, duration_text(status.eta_seconds)


def _metric(job: Job) -> str:
    results = RunFolder(job.folder).results()
    if not results:
        return ""
    name, split = results["metric"], "test" if results.get("test") else "validation"
    return f"  {split} {name} {results[split][name]:.4g}"
