"""The run folder: the only source of truth about a run. Plain files, one writer, no torch needed to read it.

runs/<study>/<ID>/scale=<s>/seed=<n>/
  config.yaml manifest.json status.json metrics.jsonl training.log freeze_audit.json
  timing_stats.json results.json predictions.json best/ latest.pt previous.pt lock
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from oelm.atomic import write_json, write_text
from oelm.errors import OelmError, UsageError
from oelm.printable import printable
from oelm.safe_files import (
    JSON_BYTES,
    LOG_BYTES,
    PREDICTIONS_BYTES,
    read_json_lines,
    read_json_object,
    read_text,
)
from oelm.safe_yaml import YAML_BYTES, parse_yaml
from oelm.training.config import Config
from oelm.training.typed import from_mapping, to_mapping

State = Literal["running", "interrupted", "finished", "diverged", "failed", "oom"]

# What a launcher reads from a finished process.
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 75  # "continue me": run the same command again (sysexits' EX_TEMPFAIL)
EXIT_DIVERGED = 76

EXIT_CODES: dict[str, int] = {
    "finished": EXIT_FINISHED,
    "failed": EXIT_FAILED,
    "oom": EXIT_FAILED,
    "interrupted": EXIT_INTERRUPTED,
    "diverged": EXIT_DIVERGED,
}

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
}


def config_to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True, width=100)


def config_from_yaml(text: str, where: str = "config") -> Config:
    """Strict: an unknown field gets the nearest valid name, a value of the wrong type its place."""
    mapping = parse_yaml(text, where)
    try:
        return from_mapping(Config, mapping)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def config_hash(config: Config) -> str:
    """A name for everything that decides the run's numbers (descriptive text of the method excluded)."""
    canonical = json.dumps(
        to_mapping(config, deciding=True), sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def config_diff(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted field name -> (value in a, value in b), for every field that decides and differs."""
    left, right = (dict(_flat(to_mapping(c, deciding=True))) for c in (a, b))
    names = list(left) + [name for name in right if name not in left]
    return {n: (left.get(n), right.get(n)) for n in names if left.get(n) != right.get(n)}


def diff_lines(a: Config, b: Config) -> list[str]:
    return [f"  {name}: {old!r} -> {new!r}" for name, (old, new) in config_diff(a, b).items()]


def run_path(root: Path | str, config: Config) -> Path:
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
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


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

    def config(self) -> Config:
        if not self.config_file.exists():
            raise OelmError(f"{self.path} is not a run folder: it has no config.yaml")
        text = read_text(self.config_file, max_bytes=YAML_BYTES)
        return config_from_yaml(text, str(self.config_file))

    def claim(self, config: Config) -> None:
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
            raise OelmError(f"{self.path} cannot be made a run folder: {error.strerror or error}") from None

    def _never_began(self) -> bool:
        """Failed before there was anything to lose: the manifest is written just before the first step."""
        status = self.status()
        kept = self.manifest_file.exists() or self.resumable
        return status is not None and status.state == "failed" and not kept

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
        """None before the run was ever started. Fields unknown to this version are left out."""
        data = _read_json(self.status_file)
        if data is None:
            return None
        known = {f.name for f in fields(Status)}
        return Status(**{name: value for name, value in data.items() if name in known})

    def write_status(self, status: Status) -> Status:
        status = replace(status, heartbeat=time.time())
        write_json(self.status_file, asdict(status))
        return status

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


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value
