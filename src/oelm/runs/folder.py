"""A run folder on disk: `RunFolder` reserves the folder for one config, and writes and checks its files."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import IO

from oelm.config.diff import diff_lines
from oelm.config.hash import config_hash
from oelm.config.run_config import RunConfig
from oelm.config.yaml import config_to_yaml
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import is_disk_full, json_text, write_json, write_text
from oelm.files.checksums import CHECKSUMS, find_damage, write_checksums
from oelm.files.read import open_regular, read_json_object
from oelm.runs.layout import VERDICT_FILES
from oelm.runs.lock import is_held
from oelm.runs.reader import FILES, RunReader
from oelm.runs.schema import (
    FreezeAudit,
    Manifest,
    Predictions,
    Results,
    Status,
    TestLosses,
    TimingStats,
    to_json,
)
from oelm.runs.states import EXIT_INTERRUPTED, is_terminal

_REASON_CHARACTERS = 500  # a longer `reason` is truncated when status.json is overwritten on a full disk


class DiskFull(OelmError):
    """There is not enough disk space. Once space is free, the same command continues the run."""

    exit_code = EXIT_INTERRUPTED


def changed_questions(id: str, place: Path) -> UsageError:
    """Return the error for an experiment whose questions differ from those of its runs in `place`."""
    return UsageError(
        f"the questions about {id} differ from those with which the runs in {place} were started. They must "
        "not change after the first results: restore them in the study file, or store new runs under a "
        "different study name with --as NAME"
    )


class _PathOf:
    """The path of one file in a run folder. It is made when it is used, because a scan has many folders."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self.name


class RunFolder(RunReader):
    """The files of one run on disk. Only the process that holds the lock of the run may write them."""

    config_file = _PathOf("config.yaml")
    manifest_file = _PathOf("manifest.json")
    status_file = _PathOf("status.json")
    metrics_file = _PathOf("metrics.jsonl")
    log_file = _PathOf("training.log")
    audit_file = _PathOf("freeze_audit.json")
    results_file = _PathOf("results.json")
    split_file = _PathOf("split.json")
    best = _PathOf("best")
    latest = _PathOf("latest.pt")
    previous = _PathOf("previous.pt")

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self._descriptor: int | None = None  # file descriptor of the folder, opened by `_hold()`

    # -- reading ------------------------------------------------------------------------------

    def open(self, name: str) -> IO[bytes]:
        return open_regular(f"{self.path}/{name}")

    def exists(self, name: str = "config.yaml") -> bool:
        return os.path.exists(f"{self.path}/{name}")

    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def damage(self) -> dict[str, str]:
        problems = find_damage(self.path)
        return {CHECKSUMS: f"{CHECKSUMS} is missing"} if problems is None else problems

    def ended(self) -> Status | None:
        """Return the status of the run if it has ended; None if it must continue or status.json is damaged.

        A finished run with missing or damaged files must continue, to write these files again.
        """
        try:
            status = self.status()
        except (OelmError, OSError):
            return None
        if status is None or not is_terminal(status.state):
            return None
        return None if status.state == "finished" and self.damage() else status

    # -- reserving the folder for a config ----------------------------------------------------

    def claim(self, config: RunConfig) -> None:
        """Write config.yaml, unless it is there already. Raises the errors of `check_claim()`."""
        if self.check_claim(config):
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.config_file, config_to_yaml(config))
        except OSError as error:
            kind = DiskFull if is_disk_full(error) else OelmError
            raise kind(
                f"cannot write to the run folder {self.path}: {error.strerror or error}. Free some space, or "
                "choose a runs folder that is writable"
            ) from None

    def check_claim(self, config: RunConfig) -> bool:
        """Return whether the folder has this config already. Raise UsageError if it has a different one.

        If the run in the folder failed before its first training step, its config may be replaced. Nothing is
        written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"cannot write to the run folder {self.path}: it is a file; move it away")
        if not self.exists():
            return False
        try:
            held = self.config()
        except OelmError as error:
            raise OelmError(
                f"{error}. The run folder is damaged: restore it from a copy, or delete {self.path} to "
                "train the run again"
            ) from None
        if config_hash(held) == config_hash(config):
            if held.compare.questions != config.compare.questions:
                raise changed_questions(config.id, self.path)
            return True
        if not self.failed_before_first_step() or is_held(self.path):
            lines = "\n".join(diff_lines(held, config))
            raise UsageError(
                f"{self.path} contains a run with a different config (in the folder -> requested):\n"
                f"{lines}\nUse another folder, or delete this one to start over."
            )
        return False

    def failed_before_first_step(self) -> bool:
        """Return whether the run failed before its first training step, so that its config may change."""
        try:
            status = self.status()
        except OelmError:
            return False
        # manifest.json is written just before the first training step.
        kept = self.manifest_file.exists() or self.resumable
        return status is not None and status.state == "failed" and not kept

    # -- checkpoints --------------------------------------------------------------------------

    @property
    def resumable(self) -> bool:
        return bool(self.checkpoints)

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.latest, self.previous) if file.exists())

    def unneeded_files(self) -> tuple[Path, ...]:
        """Return the files of an ended run that nothing reads again; () if the run must continue.

        These are the checkpoints, and the best model if the run is a tuning trial. A run that diverged keeps
        its checkpoints for `oelm run --retry-diverged`, which does not retry tuning trials.
        """
        ended = self.ended()
        trial = ended is not None and self.config().tune.trial
        if ended is None or (ended.state != "finished" and not trial):
            return ()
        return (*self.checkpoints, *(self.best.glob("*") if trial else ()))

    def drop_unneeded_files(self) -> int:
        """Delete `unneeded_files()`, and return the number of freed bytes."""
        freed = 0
        for file in self.unneeded_files():
            freed += file.stat().st_size
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder is missing, or it contains the model of a run
            self.best.rmdir()
        return freed

    # -- writing ------------------------------------------------------------------------------

    def write(
        self, record: Manifest | FreezeAudit | TimingStats | Predictions | TestLosses | Results
    ) -> None:
        """Write `record` to the file of its type in the run folder, such as a `Manifest` to manifest.json."""
        write_json(self.path / FILES[type(record)], to_json(record))

    def write_checksums(self) -> None:
        """Write checksums.json for the files in `VERDICT_FILES`; call this after all of them are written."""
        write_checksums(self.path, VERDICT_FILES)

    def write_status(self, status: Status) -> Status:
        """Write `status` to status.json with the current time as heartbeat; return the status as written.

        The reason is written as one line, because tables and logs show it in one line.
        If the file cannot be replaced (full disk, moved run folder), it is overwritten in place instead.
        """
        reason = " ".join(part.strip() for part in status.reason.splitlines())
        status = replace(status, heartbeat=time.time(), reason=reason)
        try:
            write_json(self.status_file, to_json(status))
        except OSError:
            if not self._overwrite_status(status):
                raise
        else:
            self._hold()
        return status

    def _hold(self) -> None:
        """Keep the folder open until `close()`, so that status.json is found even if the folder is moved."""
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                self._release = weakref.finalize(self, os.close, self._descriptor)

    def close(self) -> None:
        """Close the file descriptor of the folder; call this after the last `write_status()`."""
        if self._descriptor is not None:
            self._descriptor = None
            self._release()

    def _overwrite_status(self, status: Status) -> bool:
        """Overwrite status.json in place, which needs no free disk space; return whether that worked."""
        short = replace(status, reason=status.reason[:_REASON_CHARACTERS])
        content = json_text(to_json(short)).encode()
        self._hold()
        if self._descriptor is None:
            return False
        try:
            file = os.open(self.status_file.name, os.O_WRONLY, dir_fd=self._descriptor)
            try:
                # Pad with spaces, so that no part of the old text remains at the end of the file.
                content = content.ljust(os.fstat(file).st_size)
                return os.pwrite(file, content, 0) == len(content)
            finally:
                os.close(file)
        except OSError:
            return False

    # -- smaller micro-batches after a process ran out of memory -------------------------------

    def wanted_split(self) -> int:
        """Return the number of parts per micro-batch that `want_split()` stored; 1 if it was not called."""
        with contextlib.suppress(OelmError, OSError, TypeError, ValueError):
            return int(read_json_object(self.split_file).get("split", 1))
        return 1

    def want_split(self, parts: int) -> None:
        """Make the run split each micro-batch into `parts` parts from its next start on, to save memory."""
        write_json(self.split_file, {"split": parts})
