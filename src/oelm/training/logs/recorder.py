"""`Recorder` writes all files of a run during training, except checkpoints and models."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from oelm.runs.folder import RunFolder
from oelm.runs.schema import AuditRecord, FreezeAudit, Manifest, Status
from oelm.runs.states import State
from oelm.training.logs.journal import Journal
from oelm.training.logs.metrics import MetricsLog
from oelm.training.measure.timing import Timer
from oelm.training.parallel.world import World

_STATUS_SECONDS = 2.0  # minimum time between two writes of status.json


class Recorder:
    """Writes training.log, metrics.jsonl, status.json, freeze_audit.json and step times, on rank 0 only."""

    def __init__(self, folder: RunFolder, world: World, *, title: str, echo: str = "") -> None:
        self.folder = folder
        self.is_writer = world.is_main
        self.journal = Journal(None, show=False)
        if world.is_main:
            self.journal = Journal(folder.log_file, title=title, echo=echo)
        self.timer = Timer(folder.path / "step_times.bin", world.device)
        self.status = Status()
        self._status_written = -math.inf  # by time.monotonic(): the clock of the machine may be set back
        self.metrics: MetricsLog | None = None
        self.manifest = Manifest()
        self._audits = FreezeAudit()

    def row(self, step: int, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.row(step, kind, **values)

    @property
    def status_is_due(self) -> bool:
        return self.is_writer and time.monotonic() - self._status_written >= _STATUS_SECONDS

    def write_status(self, **changes: Any) -> None:
        """Write status.json: the last written status, with the fields in `changes` replaced."""
        if self.is_writer:
            self.status = self.folder.write_status(dataclasses.replace(self.status, **changes))
            self._status_written = time.monotonic()

    def write_audit(self, when: str, report: dict[str, Any]) -> None:
        """Add `report`, the freeze audit at the "start" or "end" of the run, to freeze_audit.json."""
        self._audits = dataclasses.replace(self._audits, **{when: AuditRecord(**report)})
        if self.is_writer:
            self.folder.write(self._audits)

    def speed(self) -> str:
        speed = self.timer.steps_per_second
        return f"{speed:.2f} steps/s" if speed else ""

    def close(self, state: State, reason: str) -> None:
        """Write the last log line and close all files."""
        if self.metrics is not None:
            try:
                self.metrics.close()
            except Exception as error:  # the results are complete even if a tracker fails
                self.journal.line(
                    "a tracker could not be closed, so its last rows may be missing: "
                    f"{type(error).__name__}: {error}"
                )
            self.metrics = None
        self.journal.line(f"{state}: {reason}" if reason else state, show=False)  # the caller prints this
        self.journal.close()
