"""Find all runs below a runs folder, with the state of each. In a run folder, only status.json is read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oelm.errors import OelmError, UsageError, unknown_name
from oelm.files.read import open_regular
from oelm.runs.archives.results_file import SUFFIX, StoredRun, read_results_file
from oelm.runs.folder import RunFolder
from oelm.runs.lock import is_held, read_holder
from oelm.runs.reader import RunReader
from oelm.runs.schema import Status, to_json
from oelm.runs.slurm_queue import WAITING, job_of, queue_states

STALL_SECONDS = 300.0  # a run is shown as stalled if status.json was not written for this long
# States that status.json alone determines; for the other states, the lock and the process are checked too.
_ENDED = frozenset({"finished", "diverged", "failed", "oom", "interrupted"})
_MAY_BE_QUEUED = ("running", "interrupted", "pending", "stalled", "dead")

Signature = tuple[int, ...]  # modification times and sizes of files, as `signature()` returns them


@dataclass(frozen=True)
class FoundRun:
    """A run that was found below a runs folder. None of its files has been read yet."""

    reader: RunReader
    study: str
    id: str
    scale: str
    seed: int  # -1 if the folder was renamed by hand to a name without a valid seed
    trial: str = ""  # the learning rate of a tuning trial; "" if the run is not a tuning trial


@dataclass(frozen=True)
class RunInfo(FoundRun):
    """A run with its state, as `oelm status` shows it."""

    state: str = "pending"
    status: Status | None = None
    note: str = ""

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def name(self) -> str:
        trial = f" lr={self.trial}" if self.trial else ""
        return f"{self.id} {self.scale}{trial} seed {self.seed}"

    @property
    def reason(self) -> str:
        return self.note or (self.status.reason if self.status else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the run that `oelm status --json` prints."""
        status = to_json(self.status or Status(attempt=0))
        return {
            **{name: getattr(self, name) for name in ("study", "id", "scale", "seed")},
            "trial": self.trial or None,
            **status,
            "heartbeat": status["heartbeat"] or None,
            "started": status["started"] or None,
            "state": self.state,
            "reason": self.reason,
            "folder": str(self.path),
        }


@dataclass
class ScanCache:
    """The results of earlier calls of `scan()`, for a program that scans again every few seconds."""

    runs: dict[Path, tuple[Signature, RunInfo]] = field(default_factory=dict)
    results_files: dict[Path, tuple[Signature, list[StoredRun]]] = field(default_factory=dict)


def scan(root: Path | str, *, trials: bool = True, cache: ScanCache | None = None) -> list[RunInfo]:
    """Return every run below `root` with its state; `trials=False` leaves out tuning trials.

    With a `cache`, the status of a run that has ended is read again only if its files have changed.
    If a run may be waiting in the SLURM queue, `squeue` is called once.
    """
    found = (run for run in find_runs(root, cache) if trials or not run.trial)
    return _with_queue([_with_state(run, cache) for run in found])


def require_runs_folder(root: Path | str) -> None:
    """Raise UsageError if there is no folder `root`; the name is probably mistyped."""
    if Path(root).is_dir():
        return
    if Path(root).exists():
        raise UsageError(f"--runs: {root} is not a folder; give the folder of all runs")
    raise UsageError(
        f"the runs folder {root} does not exist; train something first (`oelm demo`), or give a "
        "different folder with --runs"
    )


def signature(*files: Path | str) -> Signature:
    """Return the modification times and sizes of `files`, with (0, 0) for a file that does not exist."""
    return tuple(part for file in files for part in _stat(file))


def _stat(file: Path | str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def find_runs(root: Path | str, cache: ScanCache | None = None) -> Iterator[FoundRun]:
    """Yield each run below `root`, from run folders and from results files.

    The path of a run folder is <study>/<ID>/scale=<s>/[tune/lr=<lr>/]seed=<n>.
    """
    for study in study_names(root):
        for experiment in _folders(os.path.join(root, study)):
            for scale in _folders(experiment.path, "scale="):
                places = [(place, "") for place in _folders(scale.path, "seed=")]
                for lr in _folders(os.path.join(scale.path, "tune"), "lr="):
                    places += [(place, lr.name[3:]) for place in _folders(lr.path, "seed=")]
                for place, trial in places:
                    seed = place.name.removeprefix("seed=")
                    yield FoundRun(
                        RunFolder(place.path),
                        study,
                        experiment.name,
                        scale.name.removeprefix("scale="),
                        int(seed) if seed.isdecimal() else -1,
                        trial,
                    )
        results = Path(root) / f"{study}{SUFFIX}"
        for run in _stored_runs(results, cache) if results.is_file() else ():
            yield FoundRun(run, study, run.id, run.scale, run.seed, run.trial)


def _stored_runs(file: Path, cache: ScanCache | None) -> list[StoredRun]:
    if cache is None:
        return read_results_file(file)
    now = signature(file)
    if file not in cache.results_files or cache.results_files[file][0] != now:
        cache.results_files[file] = now, read_results_file(file)
    return cache.results_files[file][1]


def study_names(root: Path | str) -> list[str]:
    """Return the names of the studies in the runs folder `root`: its folders and its results files."""
    files = Path(root).glob(f"[!.]*{SUFFIX}")
    folders = (entry.name for entry in _folders(root))
    return sorted({*folders, *(file.name.removesuffix(SUFFIX) for file in files)})


def _with_state(run: FoundRun, cache: ScanCache | None) -> RunInfo:
    if cache is None:
        return _read_state(run)
    file = run.reader.file  # the run folder, or the results file of the study
    now = signature(file, file / "status.json", file / "results.json")
    known = cache.runs.get(run.reader.path)
    if known and known[0] == now and known[1].state in _ENDED:
        return known[1]
    info = _read_state(run)
    cache.runs[run.reader.path] = now, info
    return info


def _read_state(run: FoundRun) -> RunInfo:
    if run.seed < 0:
        path = run.reader.path
        note = (
            f"{path}: '{path.name.removeprefix('seed=')}' is not a seed; rename the folder to seed=<number>"
        )
        return RunInfo(**vars(run), state="broken", note=note)
    state, status, note = state_of(run.reader)
    return RunInfo(**vars(run), state=state, status=status, note=note)


def _with_queue(runs: list[RunInfo]) -> list[RunInfo]:
    """Return `runs`, with the state "queued" for each run whose job is waiting in the SLURM queue."""
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


def state_of(run: Path | RunReader, *, verify: bool = False) -> tuple[str, Status | None, str]:
    """Return (state, status, note) of a run.

    A run whose status.json says "running" is "stalled" if the file was not written for `STALL_SECONDS`, and
    "dead" if the process of the run does not exist any more. With `verify`, a finished run whose files do
    not match their checksums is "broken".
    """
    reader = run if isinstance(run, RunReader) else RunFolder(run)
    path = reader.path
    try:
        status = reader.status()
    except (OelmError, OSError, ValueError) as error:
        return "broken", None, str(error)
    if isinstance(reader, StoredRun):
        return (status.state, status, "") if status else ("broken", None, "status.json is missing")
    if status is None:
        if is_held(path):
            return "running", None, "starting"
        return ("pending", None, "") if reader.exists() else ("broken", None, "config.yaml is missing")
    if verify and status.state == "finished" and (damage := reader.damage()):
        return (
            "broken",
            status,
            f"{'; '.join(damage.values())}; run the same command again to complete the run",
        )
    if status.state != "running":
        return status.state, status, ""
    if not _lives(path, status):
        if status.alive() is None and job_of(path):  # another host: SLURM may restart the job
            note = f"no heartbeat for {status.age / 60:.0f} min: the SLURM job hangs or was requeued"
            return "stalled", status, note
        return "dead", status, "the process of the run is gone; run the same command to continue"
    if status.age > STALL_SECONDS:
        return "stalled", status, f"no heartbeat for {status.age / 60:.0f} min"
    return "running", status, ""


def _lives(path: Path, status: Status) -> bool:
    """Return whether the process of a run exists.

    On the host of the process the pid is checked; on other hosts, the lock and the age of the heartbeat.
    """
    alive = status.alive()
    if alive is False:
        return False
    if is_held(path):
        return True
    if alive and not read_holder(path):  # a run that was not started by a launcher has no lock
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
    """Return the path of one run folder; `name` is the path itself or the ID of an experiment.

    Raise UsageError if `scale` and `seed` do not select exactly one run of the experiment.
    """
    path = Path(name)
    if path.is_dir():
        if not RunFolder(path).exists():
            raise OelmError(f"{path} is not a run folder: it has no config.yaml")
        config = RunFolder(path).config()
        if scale not in ("", config.scale) or seed not in (None, config.seed):
            raise UsageError(
                f"{path} has scale {config.scale} and seed {config.seed}; leave out --scale and --seed when "
                "you name a run folder"
            )
        return path
    runs = scan(root, trials=False)
    same = [r for r in runs if r.id.lower() == name.lower()]
    if not runs and Path(root).exists():
        require_runs_folder(root)
    if not runs:
        raise UsageError(
            f"there is no run '{name}', because {root} has no runs: start one with `oelm train {name}`"
        )
    if not same:
        raise unknown_name("run", name, sorted({r.id for r in runs}))
    fitting = [r for r in same if (not scale or r.scale == scale) and (seed is None or r.seed == seed)]
    if len(fitting) != 1:
        listed = "\n".join(f"  {r.path}" for r in (fitting or same))
        wrong = "several runs match" if fitting else "no run of this experiment matches"
        raise UsageError(
            f"'{name}': {wrong}; select one run by --scale and --seed, or give its folder:\n{listed}"
        )
    if isinstance(fitting[0].reader, StoredRun):
        raise UsageError(
            f"'{name}': {fitting[0].reader.file} contains only the results of this run, not its weights: "
            "use --runs to name the runs folder in which it was trained"
        )
    return fitting[0].path


def tail(path: Path, lines: int) -> list[str]:
    """Return the last `lines` lines of a file, but at most 64 KiB; [] if the file cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except (OelmError, OSError):
        return []
    return text.splitlines()[-lines:]
