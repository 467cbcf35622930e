"""metrics.jsonl: one row per fact, never repeated or lost, the same bytes however often a run was killed.

Rows hold no times and no host names. A checkpoint records the file's length; a resume cuts it back to that,
so that the steps done again write their rows again, once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oelm.training.trackers import Tracker


class MetricsLog:
    """Appends rows to metrics.jsonl and passes them on to the trackers."""

    def __init__(self, path: Path, *, offset: int = 0, trackers: Sequence[Tracker] = ()) -> None:
        self.path = path
        self.trackers = list(trackers)
        self.missing = 0  # bytes a checkpoint counts on that are gone
        self._file = open(path, "ab")  # noqa: SIM115 - open as long as the run
        size = self._file.seek(0, os.SEEK_END)
        if size < offset:
            self.missing = offset - size
        self._file.truncate(min(offset, size))
        self._file.seek(0, os.SEEK_END)

    def row(self, step: int, kind: str, **values: Any) -> None:
        record = {"step": step, "kind": kind, **values}
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for tracker in self.trackers:
            if numbers:
                tracker.log(step, {f"{kind}/{name}": float(value) for name, value in numbers.items()})

    def event(self, step: int, text: str) -> None:
        self.row(step, "event", text=text)

    def sync(self) -> int:
        """Bring the rows to the disk and return the file's length, for the checkpoint."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        for tracker in self.trackers:
            tracker.close()
