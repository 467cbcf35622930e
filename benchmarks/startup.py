"""`python -m benchmarks startup`: measure the CPU seconds that a run needs in addition to its training.

The runs train for one step, so nearly all of their CPU time is start-up: Python, imports, data, model, files.
The data is tokenized before the measurement. The cost of a further run is the CPU time of several runs minus
that of one run, divided by the number of further runs. "new process" starts a worker process for each run;
"forked" forks the workers from a server that has imported torch. CPU time is measured, because it depends
less on other programs than wall time does.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.corpus import cpu_seconds_of_children
from benchmarks.markdown import table
from oelm.bench.harness import Progress
from oelm.config.overrides import override
from oelm.config.run_config import Machine, RunConfig, Scale
from oelm.errors import OelmError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slots import make_slots

WAYS = {"new process": False, "forked": True}


@dataclass(frozen=True)
class StartupBench:
    ids: tuple[str, ...] = ("GPT-02", "SST-2-02")
    scales: tuple[Scale, ...] = ("smoke", "mini")
    further: int = 3  # runs after the first one
    data_dir: str = ""


def run(bench: StartupBench, progress: Progress) -> dict[str, Any]:
    rows = []
    for name in bench.ids:
        for scale in bench.scales:
            config = override(experiment(name).at(scale, 0), {"budget.steps": 1, "data.eval_rows": 16})
            cpu_seconds(bench, config, 1, warm=True)  # tokenizes the data
            for way, warm in WAYS.items():
                first = cpu_seconds(bench, config, 1, warm=warm)
                all_runs = cpu_seconds(bench, config, 1 + bench.further, warm=warm)
                further = (all_runs - first) / bench.further
                rows.append({"id": name, "scale": scale, "way": way, "first": first, "further": further})
                progress(f"{name} {scale}, {way}: first run {first:.1f} s, each further run {further:.1f} s")
    return {"kind": "startup", "settings": asdict(bench), "runs": rows}


def cpu_seconds(bench: StartupBench, config: RunConfig, count: int, *, warm: bool) -> float:
    """Train `count` runs, one after the other in one slot; return the CPU seconds of all their processes.

    warm: fork the workers instead of starting new processes
    """
    before = cpu_seconds_of_children()
    with tempfile.TemporaryDirectory() as runs:
        machine = Machine(data_dir=bench.data_dir)
        launcher = LocalLauncher(make_slots(1, gpus="none", threads=1), machine, retries=0, warm=warm)
        jobs = launcher.launch(make_jobs([replace(config, seed=i) for i in range(count)], Path(runs)))
        launcher.close()
        if failed := [job for job in jobs if job.state != "finished"]:
            raise OelmError(f"{failed[0].name} did not finish: {failed[0].reason}")
    return cpu_seconds_of_children() - before


def lines(result: dict[str, Any]) -> list[str]:
    """Return the result as a Markdown table."""
    head = ("run", "way", "first run, CPU s", "each further run, CPU s")
    rows = [
        (f"{row['id']} {row['scale']}", row["way"], f"{row['first']:.1f}", f"{row['further']:.1f}")
        for row in result["runs"]
    ]
    return table(head, rows)
