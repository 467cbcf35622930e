"""Read the files of one run as typed objects. This module does not import torch and never changes a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

from oelm.config.run_config import RunConfig
from oelm.config.yaml import config_from_yaml
from oelm.errors import OelmError
from oelm.files.read import JSON_BYTES, PREDICTIONS_BYTES, decode, parse_json, parse_json_lines, read_limited
from oelm.files.yaml import YAML_BYTES
from oelm.runs.schema import (
    FreezeAudit,
    Manifest,
    MetricsRow,
    Predictions,
    Results,
    Status,
    TestLosses,
    TimingStats,
    from_json,
)

T = TypeVar("T")

#: {dataclass of `oelm.runs.schema`: name of the file in the run folder that contains it}
FILES: dict[type, str] = {
    Status: "status.json",
    Manifest: "manifest.json",
    FreezeAudit: "freeze_audit.json",
    TimingStats: "timing_stats.json",
    Predictions: "predictions.json",
    TestLosses: "test_losses.json",
    Results: "results.json",
}


class RunReader(ABC):
    """Base class for reading the files of a run: `RunFolder` reads a folder, `StoredRun` a results file.

    Methods such as `manifest()` return None if their file does not exist, and raise OelmError if it is
    damaged.
    """

    def __init__(self, path: Path | str, file: Path | None = None) -> None:
        self.path = Path(path)
        self.file = file or self.path  # what exists on disk: the run folder, or the results file of the study

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open a file of the run. Raise FileNotFoundError if the run does not have it."""

    @abstractmethod
    def exists(self, name: str = "config.yaml") -> bool:
        """Return whether the run has the file `name`. Every run has config.yaml, the default."""

    @abstractmethod
    def damage(self) -> dict[str, str]:
        """Return {file name: message} of the files of a finished run that do not match their checksums."""

    @abstractmethod
    def size(self) -> int:
        """Return the total size of the run's files in bytes."""

    def config(self) -> RunConfig:
        if not self.exists():
            raise OelmError(f"{self.path} is not a run folder: it has no config.yaml")
        return config_from_yaml(self._text("config.yaml", YAML_BYTES), f"{self.path}/config.yaml")

    def manifest(self) -> Manifest | None:
        return self._json(Manifest)

    def results(self) -> Results | None:
        results = self._json(Results)
        if results is not None and (problem := results.problem()):
            raise OelmError(f"{self.path / 'results.json'}: {problem}")
        return results

    def timing(self) -> TimingStats | None:
        return self._json(TimingStats)

    def freeze_audit(self) -> FreezeAudit | None:
        return self._json(FreezeAudit)

    def predictions(self) -> Predictions | None:
        return self._json(Predictions, PREDICTIONS_BYTES)

    def test_losses(self) -> TestLosses | None:
        return self._json(TestLosses, PREDICTIONS_BYTES)

    def status(self) -> Status | None:
        """Return the status of the run; None if the run has not been started.

        If status.json says "finished" but results.json is missing, the returned state is "interrupted".
        """
        status = self.recorded_status()
        if status is not None and status.state == "finished" and not self.exists("results.json"):
            reason = "results.json is missing; run the same command again to complete the run"
            return replace(status, state="interrupted", reason=reason)
        return status

    def recorded_status(self) -> Status | None:
        """Return the content of status.json; None if the file does not exist."""
        return self._json(Status)

    def metrics(self, kind: str = "") -> Iterator[MetricsRow]:
        """Yield the rows of metrics.jsonl, or only the rows of one `kind`; skip an incomplete last line."""
        where = str(self.path / "metrics.jsonl")
        try:
            file = self.open("metrics.jsonl")
        except FileNotFoundError:
            return
        with file:
            for number, row in enumerate(parse_json_lines(file, where), 1):
                if not kind or row.get("kind") == kind:
                    yield MetricsRow.from_json(row, f"{where}, line {number}")

    def finished_results(self) -> Results | None:
        """Return the results of a run; None if it is not finished. Raise OelmError if a checksum is wrong."""
        status = self.status()
        if status is None or status.state != "finished":
            return None
        if damage := self.damage():
            raise OelmError(
                f"{self.path} is damaged: {'; '.join(damage.values())}. "
                "Train the run again with the same command, or restore the files from a copy."
            )
        return self.results()

    def _text(self, name: str, max_bytes: int) -> str:
        where = f"{self.path}/{name}"
        with self.open(name) as file:
            return decode(read_limited(file, where, max_bytes), where)

    def _json(self, cls: type[T], max_bytes: int = JSON_BYTES) -> T | None:
        try:
            text = self._text(FILES[cls], max_bytes)
        except FileNotFoundError:
            return None
        where = f"{self.path}/{FILES[cls]}"
        return from_json(cls, parse_json(text, where), where)
