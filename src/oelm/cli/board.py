"""What `oelm run` shows while it works: a live table on a terminal, plain lines anywhere else."""

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
def board(quiet: bool = False) -> Iterator[Events]:
    """The events for a launcher; `quiet` shows nothing, for --json."""
    if quiet:
        yield Events()
    elif sys.stdout.isatty():
        with _LiveBoard() as live:
            yield Events(changed=changed, tick=live.tick)
    else:
        yield Events(changed=changed, tick=_PlainBoard().tick)


def changed(job: Job) -> None:
    """One line for every change of a run's state; none for the hundreds that may have finished before."""
    if job.ended_before and job.state == "finished":
        return
    where = f" on {job.slot}" if job.slot else ""
    why = f": {job.reason}" if job.reason and job.state != "finished" else ""
    metric = _metric(job) if job.state == "finished" else ""
    say(printable(f"{time.strftime('%H:%M:%S')}  {job.state:11} {job.name}{where}{why}{metric}"))


def counts(jobs: Sequence[Job]) -> str:
    found = Counter(job.state for job in jobs)
    earlier = Counter(job.state for job in jobs if job.ended_before)
    before = {state: f" ({n} before)" for state, n in earlier.items()}
    return ", ".join(f"{n} {state}{before.get(state, '')}" for state, n in found.items()) or "none"


class _PlainBoard:
    """A line of progress now and then, for logs."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def tick(self, jobs: Sequence[Job]) -> None:
        if time.monotonic() - self.last < _PLAIN_SECONDS:
            return
        self.last = time.monotonic()
        going = [f"{row[0]} {row[2]} (ETA {row[4]})" for row in _rows(jobs)]
        say(printable(f"{time.strftime('%H:%M:%S')}  {counts(jobs)}; {'; '.join(going)}"))


class _LiveBoard:
    """A table of the running ones below the lines of what happened."""

    def __init__(self) -> None:
        from rich.live import Live

        self.live = Live(auto_refresh=False, transient=True)  # prints go above it
        self.last = 0.0

    def __enter__(self) -> _LiveBoard:
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
            table.add_row(*(Text(printable(cell)) for cell in row))  # a str would be read as markup
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
