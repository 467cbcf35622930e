"""All runs below a folder and the state each is really in. Reads one small file per run, never whole logs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oelm.errors import OelmError, UsageError, unknown_name
from oelm.files.read import open_regular
from oelm.runs.folder import RunFolder, Status
from oelm.runs.lock import is_held, read_holder
from oelm.runs.slurm_queue import WAITING, job_of, queue_states

STALL_SECONDS = 300.0  # without a heartbeat for this long a living process is taken to hang

# In the order in which a list of runs should show them: what needs a person first.
STATES = (
    "dead",
    "stalled",
    "diverged",
    "oom",
    "failed",
    "broken",
    "running",
    "queued",
    "interrupted",
    "pending",
    "finished",
)
TROUBLE = frozenset({"dead", "stalled", "diverged", "oom", "failed", "broken"})


@dataclass(frozen=True)
class RunInfo:
    """One run folder as found: where it is, what it is, how it is."""

    path: Path
    study: str
    id: str
    scale: str
    seed: int
    state: str
    status: Status | None = None
    trial: str = ""  # the rate, for a tuning trial
    note: str = ""

    @property
    def name(self) -> str:
        trial = f" lr={self.trial}" if self.trial else ""
        return f"{self.id} {self.scale}{trial} seed {self.seed}"

    @property
    def reason(self) -> str:
        return self.note or (self.status.reason if self.status else "")

    def to_dict(self) -> dict[str, Any]:
        status = self.status
        return {
            "study": self.study,
            "id": self.id,
            "scale": self.scale,
            "seed": self.seed,
            "trial": self.trial or None,
            "state": self.state,
            "step": status.step if status else 0,
            "total_steps": status.total_steps if status else 0,
            "loss": status.loss if status else None,
            "metric": status.metric if status else None,
            "steps_per_second": status.steps_per_second if status else None,
            "eta_seconds": status.eta_seconds if status else None,
            "heartbeat": status.heartbeat if status else None,
            "host": status.host if status else "",
            "pid": status.pid if status else 0,
            "attempt": status.attempt if status else 0,
            "resumes": status.resumes if status else 0,
            "reason": self.reason,
            "folder": str(self.path),
        }


def scan(root: Path | str, *, trials: bool = True) -> list[RunInfo]:
    """Every run below `root` (runs/<study>/<ID>/scale=<s>/...). Costs one status.json per run, and one call
    of `squeue` if there is SLURM and a run that it may still have in its queue."""
    return _with_queue(_scan(root, trials))


def _with_queue(runs: list[RunInfo]) -> list[RunInfo]:
    """The runs whose job waits in SLURM's queue, for the first time or again, as such."""
    jobs = {run.path: job_of(run.path) for run in runs if run.state in _MAY_BE_QUEUED}
    if not any(jobs.values()):
        return runs
    states = queue_states() or {}
    return [
        replace(run, state="queued", note=f"SLURM job {jobs[run.path]}: {states[jobs[run.path]].lower()}")
        if states.get(jobs.get(run.path, "")) in WAITING and not is_held(run.path)
        else run
        for run in runs
    ]


_MAY_BE_QUEUED = ("running", "interrupted", "pending", "stalled", "dead")


def _scan(root: Path | str, trials: bool) -> list[RunInfo]:
    found = []
    for study in _folders(root):
        for experiment in _folders(study.path):
            for scale in _folders(experiment.path, "scale="):
                for place in _folders(scale.path, "seed="):
                    found.append(_look(place, study.name, experiment.name, scale.name))
                if trials:
                    for rate in _folders(os.path.join(scale.path, "tune"), "lr="):
                        for place in _folders(rate.path, "seed="):
                            found.append(_look(place, study.name, experiment.name, scale.name, rate.name[3:]))
    return found


def _look(place: os.DirEntry[str], study: str, id: str, scale: str, trial: str = "") -> RunInfo:
    digits, path = place.name.removeprefix("seed="), Path(place.path)
    scale = scale.removeprefix("scale=")
    if not digits.isdecimal():
        return RunInfo(path, study, id, scale, -1, "broken", None, trial, f"'{digits}' is no seed: {path}")
    state, status, note = state_of(path)
    return RunInfo(path, study, id, scale, int(digits), state, status, trial, note)


def state_of(path: Path, *, verify: bool = False) -> tuple[str, Status | None, str]:
    """(state, status, note). status.json says what the run believed when it last wrote; whether its process
    still lives decides between running, stalled and dead.

    verify: also compare the files of a finished run with their checksums; "broken" when they differ.
    """
    folder = RunFolder(path)
    try:
        status = folder.status()
    except (OelmError, OSError, ValueError) as error:
        return "broken", None, str(error)
    if status is None:
        if is_held(path):
            return "running", None, "starting"
        return ("pending", None, "") if folder.exists() else ("broken", None, "no config.yaml")
    if verify and status.state == "finished" and (damaged := folder.integrity().damaged):
        return "broken", status, f"{'; '.join(damaged)}; run the same command again to complete the run"
    if status.state != "running":
        return status.state, status, ""
    if not _lives(path, status):
        if status.alive() is None and job_of(path):  # on a node of a cluster, which may start it again itself
            note = f"no heartbeat for {status.age / 60:.0f} min: its SLURM job hangs, or was requeued"
            return "stalled", status, note
        return "dead", status, "its process is gone; run the same command to go on"
    if status.age > STALL_SECONDS:
        return "stalled", status, f"no heartbeat for {status.age / 60:.0f} min"
    return "running", status, ""


def _lives(path: Path, status: Status) -> bool:
    """On this host the process is asked; elsewhere the lock, as far as the file system passes it on,
    and then the heartbeat have to be believed."""
    alive = status.alive()
    if alive is False:
        return False
    if is_held(path):
        return True
    if alive and not read_holder(path):  # a run started without the launcher takes no lock
        return True
    return alive is None and time.time() - status.heartbeat < STALL_SECONDS


def _folders(path: str | Path, prefix: str = "") -> Iterator[os.DirEntry[str]]:
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith(prefix) and not entry.name.startswith(".") and entry.is_dir():
            yield entry


def find_run(root: Path | str, name: str, *, scale: str = "", seed: int | None = None) -> Path:
    """The run folder meant by a path, or by an experiment ID when only one run of it fits."""
    path = Path(name)
    if path.is_dir():
        if not RunFolder(path).exists():
            raise OelmError(f"{path} is not a run folder: it has no config.yaml")
        return path
    runs = scan(root, trials=False)
    same = [r for r in runs if r.id.lower() == name.lower()]
    if not runs:
        raise UsageError(f"there is no run '{name}': {root} holds none (`oelm train {name}` makes one)")
    if not same:
        raise unknown_name("run", name, sorted({r.id for r in runs}))
    fitting = [r for r in same if (not scale or r.scale == scale) and (seed is None or r.seed == seed)]
    if len(fitting) != 1:
        listed = "\n".join(f"  {r.path}" for r in (fitting or same))
        wrong = "several runs fit" if fitting else "no run of it fits"
        raise UsageError(f"'{name}': {wrong}; name one with --scale and --seed, or by its folder:\n{listed}")
    return fitting[0].path


def tail(path: Path, lines: int = 20, most: int = 64 * 1024) -> list[str]:
    """The last lines of a file, reading no more than its last `most` bytes."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read().decode("utf-8", errors="replace")
    except (OelmError, OSError):
        return []
    return text.splitlines()[-lines:]
