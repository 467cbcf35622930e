"""`oelm status`: print the state of all runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from oelm.cli.options import Json, Runs, Study, require_study
from oelm.cli.output import print, print_json, print_table
from oelm.cli.values import Names
from oelm.config.run_config import Scale
from oelm.printable import printable
from oelm.runs.scan import RunInfo, require_runs_folder, scan
from oelm.runs.states import STATES, TROUBLE
from oelm.units import counted, duration_text

HEADER = ("run", "study", "state", "step", "loss", "metric", "steps/s", "ETA", "heartbeat", "reason")
_LIVE = ("running", "stalled", "dead")


@Parameter(name="*")
@dataclass(frozen=True)
class RunFilter:
    """Options that select the runs to list."""

    runs: Runs = "runs"
    study: Study = ""
    scale: Scale | None = None
    """Only runs of this scale."""
    state: Annotated[Names, Parameter(choices=STATES)] = ()
    """Only runs in these states."""
    no_trials: bool = False
    """Leave tuning trials out."""

    def find(self) -> list[RunInfo]:
        """Return the runs that match the options; runs that need attention come first."""
        runs = scan(self.runs, trials=not self.no_trials)
        require_study(self.study, (run.study for run in runs))
        require_runs_folder(self.runs)
        found = [
            run
            for run in runs
            if (not self.study or run.study == self.study)
            and (not self.scale or run.scale == self.scale)
            and (not self.state or run.state in self.state)
        ]
        return sorted(found, key=lambda run: STATES.index(run.state))


def status(*, filter: RunFilter = RunFilter(), json: Json = False) -> None:
    """Print the matching runs as a table."""
    runs = filter.find()
    if json:
        print_json([run.to_dict() for run in runs])
    elif runs:
        print_table(HEADER, [cells(run) for run in runs])
        print(f"\n{summary(runs)}")
    elif filter.study or filter.scale or filter.state:
        print(f"no matching runs in {filter.runs}")
    else:
        print(f"no runs in {filter.runs}")


def cells(run: RunInfo) -> tuple[str, ...]:
    """Return the table cells of a run; control characters are escaped, because the text comes from files."""
    return tuple(printable(cell) for cell in _cells(run))


def _cells(run: RunInfo) -> tuple[str, ...]:
    status = run.status
    state = run.state.upper() if run.state in TROUBLE else run.state
    if status is None:
        return (run.name, run.study, state, "-", "-", "-", "-", "-", "-", run.reason)
    metric = status.metric
    return (
        run.name,
        run.study,
        state,
        f"data {status.preparing}" if status.preparing else f"{status.step}/{status.total_steps}",
        f"{status.loss:.4f}" if status.loss is not None else "-",
        f"{metric.name} {metric.value:.4g}" if metric else "-",
        f"{status.steps_per_second:.2f}" if status.steps_per_second else "-",
        duration_text(status.eta_seconds) if run.state == "running" else "-",
        f"{duration_text(max(0.0, time.time() - status.heartbeat))} ago" if run.state in _LIVE else "-",
        run.reason,
    )


def summary(runs: list[RunInfo]) -> str:
    """Return one line with the number of runs in each state."""
    counts = {state: sum(run.state == state for run in runs) for state in STATES}
    return f"{counted(len(runs), 'run')}: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
