"""`Board`: the current runs of a runs folder and their comparisons; only changed runs are read again."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oelm.analysis.arms import Arm, Planned, gather_arms
from oelm.analysis.compare import compare_all
from oelm.analysis.load import LoadedRun, LoadWarning, collect, read_run
from oelm.errors import OelmError
from oelm.report.board.metrics import RunMetrics
from oelm.report.board.questions import ShownQuestion, all_questions
from oelm.runs.archives.results_file import StoredRun
from oelm.runs.scan import RunInfo, ScanCache, scan, signature

_READ_BY_ANALYSIS = ("config.yaml", "results.json", "checksums.json")
_MAX_AGE = 1.0  # seconds; several open pages share one scan of the runs folder until it is older


@dataclass(frozen=True)
class Verdicts:
    """The arms of all runs that could be read, and the questions about these arms with their verdicts."""

    arms: tuple[Arm, ...] = ()
    questions: tuple[ShownQuestion, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How many of all runs the analysis has read so far."""

    read: int
    total: int


class Board:
    """The current state of a runs folder. All methods may be called from several threads."""

    def __init__(self, root: Path | str, planned: Planned) -> None:
        self.root = Path(root)
        self.runs: Mapping[str, RunInfo] = {}  # path relative to the runs folder -> run
        self.planned = planned
        self.problem = ""  # why the runs folder cannot be scanned
        self.verdicts = Verdicts()
        self.progress: Progress | None = None  # how far the first analysis is; None after it
        self._scanned = -_MAX_AGE
        self._cache = ScanCache()
        self._loaded: dict[str, tuple[object, LoadedRun | None]] = {}
        self._metrics: dict[str, RunMetrics] = {}
        self._analysed: object = None
        self._contents: dict[str, tuple[RunInfo, object]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def refresh(self) -> None:
        """Scan the runs folder, unless it was scanned in the last second.

        If the results of runs have changed, a new analysis starts in the background.
        """
        with self._lock:
            if time.monotonic() - self._scanned >= _MAX_AGE:
                self._scan()
                self._scanned = time.monotonic()

    def _scan(self) -> None:
        try:
            found = scan(self.root, cache=self._cache)
            self.problem = ""
        except (OelmError, OSError) as error:
            self.problem = str(error)
            return
        self.runs = {run.path.relative_to(self.root).as_posix(): run for run in found}
        for kept in (self._loaded, self._metrics):
            for key in [key for key in kept if key not in self.runs]:
                del kept[key]
        before, self._contents = self._contents, {}
        for key, run in self.runs.items():
            seen = before.get(key)
            # `scan()` returns the same object for a run that has ended and whose files are unchanged, so the
            # content of such a run is not computed again.
            self._contents[key] = seen if seen is not None and seen[0] is run else (run, _content(run))
        states = {key: content for key, (_run, content) in self._contents.items()}
        if states != self._analysed and (self._thread is None or not self._thread.is_alive()):
            self._analysed = states
            self._thread = threading.Thread(target=self._analyse, args=(dict(self.runs), states), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Scan the runs folder, and wait until the analysis is complete."""
        self.refresh()
        if self._thread is not None:
            self._thread.join()

    def _analyse(self, runs: Mapping[str, RunInfo], states: Mapping[str, object]) -> None:
        try:
            self._compare(runs, states)
        finally:
            self.progress = None

    def _compare(self, runs: Mapping[str, RunInfo], states: Mapping[str, object]) -> None:
        warnings: list[LoadWarning] = []
        found = []
        for number, (key, run) in enumerate(runs.items()):
            known = self._loaded.get(key)
            if known is None or known[0] != states[key]:
                known = states[key], _read(run, warnings)
                self._loaded[key] = known
            found.append(known[1])
            self.progress = None if self.verdicts.arms else Progress(number, len(runs))
        loaded = collect(self.root, found, warnings)
        if not self.verdicts.arms:  # show the arms before they are compared, so that curves appear early
            self.verdicts = Verdicts(gather_arms(loaded.runs, self.planned))
        made = compare_all(loaded, self.planned)
        self.verdicts = Verdicts(made.arms, all_questions(made, loaded.trials))

    def metrics(self, key: str) -> RunMetrics:
        """Return the measurements of a run, including what was appended to its files since the last call."""
        run = self.runs[key]
        with self._lock:
            metrics = self._metrics.setdefault(key, RunMetrics())
            metrics.update(run.reader)
        return metrics


def _content(run: RunInfo) -> object:
    """Return a value that changes when the analysis must read the run again: its state and its files."""
    file = run.reader.file  # the run folder, or the STUDY.jsonl.xz file that contains the run
    stored = isinstance(run.reader, StoredRun)
    return run.state, signature(*([file] if stored else [file / name for name in _READ_BY_ANALYSIS]))


def _read(run: RunInfo, warnings: list[LoadWarning]) -> LoadedRun | None:
    try:
        return read_run(run.reader, warnings)
    except (OelmError, OSError, ValueError):
        return None
