"""The run folder: the only source of truth about a run. Plain files, one writer, no torch needed to read it.

runs/<study>/<ID>/scale=<s>/seed=<n>/
  config.yaml manifest.json status.json metrics.jsonl training.log freeze_audit.json
  timing_stats.json results.json predictions.json checksums.json best/ latest.pt previous.pt lock
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from oelm.config.diff import diff_lines
from oelm.config.hash import config_hash
from oelm.config.run_config import RunConfig
from oelm.config.yaml import config_from_yaml, config_to_yaml
from oelm.errors import OelmError, TransientError, UsageError
from oelm.files.atomic import is_disk_full, json_text, write_json, write_text
from oelm.files.checksums import CHECKSUMS, find_damage, write_checksums
from oelm.files.read import (
    JSON_BYTES,
    LOG_BYTES,
    PREDICTIONS_BYTES,
    read_json_lines,
    read_json_object,
    read_text,
)
from oelm.files.yaml import YAML_BYTES
from oelm.printable import printable

State = Literal["running", "interrupted", "finished", "diverged", "failed", "oom"]

# What a launcher reads from a finished process.
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 75  # "continue me": run the same command again (sysexits' EX_TEMPFAIL)
EXIT_DIVERGED = 76
EXIT_PERMANENT = 78  # the same command fails again until the user changes something (sysexits' EX_CONFIG)

# Everything a verdict rests on, listed in checksums.json when a run has finished. status.json is left out: it
# is written again after that, and no figure is computed from it.
VERDICT_FILES = (
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "freeze_audit.json",
    "timing_stats.json",
    "predictions.json",
    "results.json",
)
RESULTS_FORMAT = 2  # from 2 on, a finished run has a checksums.json

EXIT_CODES: dict[str, int] = {
    "finished": EXIT_FINISHED,
    "failed": EXIT_FAILED,
    "oom": EXIT_FAILED,
    "interrupted": EXIT_INTERRUPTED,
    "diverged": EXIT_DIVERGED,
}


def exit_code_of(error: OelmError) -> int:
    """The exit code of a run that ended with `error`; 78 for an error that a retry would only repeat."""
    permanent = error.exit_code == EXIT_FAILED and not isinstance(error, TransientError)
    return EXIT_PERMANENT if permanent else error.exit_code


#: What of a run travels in an archive, with the largest size that is accepted from elsewhere. Not in it:
#: checkpoints, locks and job numbers, which mean something on one machine only, and trackers' files.
RESULT_FILES: dict[str, int] = {
    "config.yaml": YAML_BYTES,
    "manifest.json": JSON_BYTES,
    "status.json": JSON_BYTES,
    "metrics.jsonl": LOG_BYTES,
    "training.log": LOG_BYTES,
    "console.log": LOG_BYTES,
    "attempts.jsonl": LOG_BYTES,
    "freeze_audit.json": JSON_BYTES,
    "timing_stats.json": JSON_BYTES,
    "step_times.bin": LOG_BYTES,
    "results.json": JSON_BYTES,
    "predictions.json": PREDICTIONS_BYTES,
    "checksums.json": JSON_BYTES,
}


def run_path(root: Path | str, config: RunConfig) -> Path:
    """Where a run lives below the runs folder; a tuning trial beside, never among, the real runs."""
    study, id = _folder_name("study", config.study), _folder_name("id", config.id)
    place = Path(root) / study / id / f"scale={config.scale}"
    if config.tune.trial:
        place = place / "tune" / f"lr={config.optim.lr:g}"
    return place / f"seed={config.seed}"


def _folder_name(field: str, name: str) -> str:
    """`name`, or an error when as a folder it would lie elsewhere, be hidden or be unprintable."""
    if not name or name.startswith(".") or {"/", "\\"} & set(name) or printable(name) != name:
        raise UsageError(f"{field}: {name!a} cannot be the name of a folder; use letters, digits, - and _")
    return name


@dataclass(frozen=True)
class Status:
    """status.json: what a monitor shows. The only file of the folder that is rewritten while a run lives."""

    state: State = "running"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    metric: dict[str, Any] | None = None  # {"name", "value"}: the best so far on validation
    steps_per_second: float | None = None
    eta_seconds: float | None = None
    heartbeat: float = 0.0  # unix time of this writing
    started: float = 0.0  # unix time at which this process took the run up
    pid: int = 0
    host: str = ""
    attempt: int = 1  # processes that worked on the run so far
    resumes: int = 0  # of them, those that went on from a checkpoint
    reason: str = ""

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat."""
        return time.time() - self.heartbeat

    def alive(self) -> bool | None:
        """Whether its process exists; None when it runs (or ran) on another host."""
        if self.host != socket.gethostname() or self.pid <= 0:
            return None
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            return True
        return True


class DiskFull(OelmError):
    """There is too little space to go on; the same command goes on once there is more."""

    exit_code = EXIT_INTERRUPTED


@dataclass(frozen=True)
class Integrity:
    """What the checksums say about the files of a finished run."""

    damaged: tuple[str, ...] = ()  # one text for each file that is missing or changed
    verified: bool = True  # False for a run of an earlier version, which wrote no checksums


class RunFolder:
    """Names, reading and writing of a run's files. Reading never needs torch and never changes anything."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.manifest_file = self.path / "manifest.json"
        self.status_file = self.path / "status.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.log_file = self.path / "training.log"
        self.audit_file = self.path / "freeze_audit.json"
        self.timing_file = self.path / "timing_stats.json"
        self.results_file = self.path / "results.json"
        self.split_file = self.path / "split.json"
        self.predictions_file = self.path / "predictions.json"
        self.best = self.path / "best"
        self.latest = self.path / "latest.pt"
        self.previous = self.path / "previous.pt"
        self.lock = self.path / "lock"
        self._descriptor: int | None = None  # of the folder, for `_overwrite_status`

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def exists(self) -> bool:
        return self.config_file.exists()

    @property
    def resumable(self) -> bool:
        return bool(self.checkpoints)

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.latest, self.previous) if file.exists())

    def drop_checkpoints(self) -> int:
        """Give up an exact resume; returns the bytes freed."""
        freed = 0
        for file in self.checkpoints:
            freed += file.stat().st_size
            file.unlink(missing_ok=True)
        return freed

    # -- config ---------------------------------------------------------------------------------

    def config(self) -> RunConfig:
        if not self.config_file.exists():
            raise OelmError(f"{self.path} is not a run folder: it has no config.yaml")
        text = read_text(self.config_file, max_bytes=YAML_BYTES)
        return config_from_yaml(text, str(self.config_file))

    def claim(self, config: RunConfig) -> None:
        """Make the folder this config's, or refuse with the differences when it already holds another.

        One whose run failed before it began (an impossible wish, say) may be asked for something better."""
        if self.exists():
            held = self.config()
            if config_hash(held) == config_hash(config):
                return
            if not self._never_began():
                lines = "\n".join(diff_lines(held, config))
                raise UsageError(
                    f"{self.path} holds a run with another config (folder -> asked):\n{lines}\n"
                    "Use another folder, or remove this one to start over."
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.config_file, config_to_yaml(config))
        except OSError as error:
            kind = DiskFull if is_disk_full(error) else OelmError
            raise kind(f"{self.path} cannot be made a run folder: {error.strerror or error}") from None

    def _never_began(self) -> bool:
        """Failed before there was anything to lose: the manifest is written just before the first step."""
        try:
            status = self.status()
        except OelmError:
            return False
        kept = self.manifest_file.exists() or self.resumable
        return status is not None and status.state == "failed" and not kept

    # -- checksums ------------------------------------------------------------------------------

    def write_checksums(self, names: Iterable[str] = VERDICT_FILES) -> None:
        """The last act of a finished run: checksums.json for those of `names` that exist."""
        write_checksums(self.path, names)

    def integrity(self) -> Integrity:
        """Compare the files of a finished run with checksums.json."""
        problems = find_damage(self.path)
        if problems is not None:
            return Integrity(tuple(problems))
        try:
            written_with = (self.results() or {}).get("format", 1)
        except (OelmError, OSError) as error:
            return Integrity((str(error),), verified=False)
        missing = isinstance(written_with, int) and written_with >= RESULTS_FORMAT
        return Integrity((f"{CHECKSUMS} is missing",) if missing else (), verified=False)

    def ended(self) -> Status | None:
        """The status of a run with nothing left to do; None when there is something, or it cannot be told.

        A diverged run has ended: the same steps would diverge again. A finished one has, unless a file that
        its results consist of is missing or damaged.
        """
        try:
            status = self.status()
        except (OelmError, OSError):
            return None
        if status is None or status.state not in ("finished", "diverged"):
            return None
        return None if status.state == "finished" and self.integrity().damaged else status

    def finished_results(self) -> dict[str, Any] | None:
        """results.json of a finished run, verified; None when it has not finished."""
        status = self.status()
        if status is None or status.state != "finished":
            return None
        if damaged := self.integrity().damaged:
            raise OelmError(
                f"{self.path} is damaged: {'; '.join(damaged)}. "
                "Run it again, or put the files back from a copy."
            )
        return self.results()

    # -- json files -----------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any] | None:
        return _read_json(self.manifest_file)

    def results(self) -> dict[str, Any] | None:
        return _read_json(self.results_file)

    def timing(self) -> dict[str, Any] | None:
        return _read_json(self.timing_file)

    def freeze_audit(self) -> dict[str, Any] | None:
        return _read_json(self.audit_file)

    def predictions(self) -> dict[str, Any] | None:
        return _read_json(self.predictions_file, PREDICTIONS_BYTES)

    def status(self) -> Status | None:
        """The status of the run; None before it was ever started.

        A run whose results.json is missing has not finished, whatever status.json says.
        """
        status = self.recorded_status()
        if status is not None and status.state == "finished" and not self.results_file.exists():
            reason = f"{self.results_file.name} is missing; run the same command again to complete the run"
            return replace(status, state="interrupted", reason=reason)
        return status

    def recorded_status(self) -> Status | None:
        """What status.json says. Fields unknown to this version are left out."""
        data = _read_json(self.status_file)
        if data is None:
            return None
        known = {f.name for f in fields(Status)}
        status = Status(**{name: value for name, value in data.items() if name in known})
        if problem := _status_problem(status):
            raise OelmError(f"{self.status_file}: {problem}")
        return status

    def write_status(self, status: Status) -> Status:
        """Write status.json; on a full disk, or in a folder that was moved, over the one that is there."""
        status = replace(status, heartbeat=time.time())
        try:
            write_json(self.status_file, asdict(status))
        except OSError:
            if not self._overwrite_status(status):
                raise
        else:
            self._hold()
        return status

    def _hold(self) -> None:
        """Keep the folder open until `close`, so that its files are found even after somebody moved it."""
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                self._release = weakref.finalize(self, os.close, self._descriptor)

    def close(self) -> None:
        """Let go of the folder, after the last `write_status`."""
        if self._descriptor is not None:
            self._descriptor = None
            self._release()

    def _overwrite_status(self, status: Status) -> bool:
        """Overwrite status.json in place, which needs no new block and no new inode; whether that worked."""
        content = json_text(asdict(replace(status, reason=status.reason[:500]))).encode()
        self._hold()
        if self._descriptor is None:
            return False
        try:
            file = os.open(self.status_file.name, os.O_WRONLY, dir_fd=self._descriptor)
            try:
                content = content.ljust(os.fstat(file).st_size)  # blanks at the end are valid JSON
                return os.pwrite(file, content, 0) == len(content)
            finally:
                os.close(file)
        except OSError:
            return False

    def wanted_split(self) -> int:
        """Into how many parts one of several processes, out of memory, asked to cut micro-batches."""
        with contextlib.suppress(OelmError, TypeError, ValueError):
            return int((_read_json(self.split_file) or {}).get("split", 1))
        return 1

    def want_split(self, parts: int) -> None:
        write_json(self.split_file, {"split": parts})

    # -- metrics --------------------------------------------------------------------------------

    def metrics(self, kind: str = "") -> Iterator[dict[str, Any]]:
        """Rows of metrics.jsonl, of one kind if asked. A last line still being written is left out."""
        if not self.metrics_file.exists():
            return
        for row in read_json_lines(self.metrics_file):
            if not kind or row.get("kind") == kind:
                yield row


def _read_json(path: Path, max_bytes: int = JSON_BYTES) -> dict[str, Any] | None:
    try:
        return read_json_object(path, max_bytes=max_bytes)
    except FileNotFoundError:
        return None


def audit_holds(audit: dict[str, Any]) -> bool:
    """Whether every report in freeze_audit.json (one, or one each for the start and end of the run) is ok."""
    reports = [audit, *(value for value in audit.values() if isinstance(value, dict))]
    return all(report.get("ok", True) is True for report in reports)


def _status_problem(status: Status) -> str:
    """What no version of the trainer would have written; "" when all is as it should be."""
    if status.state not in get_args(State):
        return f"unknown state {status.state!r}"
    kinds: dict[str, Any] = {
        **dict.fromkeys(("step", "total_steps", "pid", "attempt", "resumes"), int),
        **dict.fromkeys(("heartbeat", "started"), int | float),
        **dict.fromkeys(("loss", "steps_per_second", "eta_seconds"), int | float | None),
        **dict.fromkeys(("host", "reason"), str),
        "metric": dict | None,
    }
    for name, kind in kinds.items():
        value = getattr(status, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name} is {value!r}"
    metric = status.metric
    if metric is not None and not ("name" in metric and isinstance(metric.get("value"), int | float)):
        return f"metric is {metric!r}"
    return ""
