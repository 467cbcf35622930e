"""`Board`: the runs of a folder as they are now, and their comparisons, kept up to date at little cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oelm.analysis.arms import Arm, Planned, gather_arms
from oelm.analysis.compare import Comparison, compare_all
from oelm.analysis.load import LoadedRun, LoadWarning, collect, read_run
from oelm.analysis.pairs import Pair, find_pairs
from oelm.errors import OelmError
from oelm.report.board.metrics import RunMetrics
from oelm.runs.results_file import StoredRun
from oelm.runs.scan import RunInfo, ScanCache, scan, signature

_READ_BY_ANALYSIS = ("config.yaml", "results.json", "checksums.json")
_MAX_AGE = 1.0  # seconds; several open pages share one scan


@dataclass(frozen=True)
class Verdicts:
    """The arms and comparisons of all runs that could be read."""

    arms: tuple[Arm, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    waiting: tuple[Pair, ...] = ()  # comparisons that lack finished runs


@dataclass(frozen=True)
class Progress:
    """How many runs the analysis has read so far."""

    read: int
    total: int


class Board:
    """The current state of a runs folder. All methods may be called from several threads."""

    def __init__(self, root: Path | str, planned: Planned) -> None:
        self.root = Path(root)
        self.planned = planned
        self.problem = ""  # why the runs folder cannot be scanned
        self.verdicts = Verdicts()
        self.progress: Progress | None = None  # of the analysis, while it runs
        self._runs: dict[str, RunInfo] = {}
        self._scanned = -_MAX_AGE
        self._cache = ScanCache()
        self._loaded: dict[str, tuple[object, LoadedRun | None]] = {}
        self._metrics: dict[str, RunMetrics] = {}
        self._analysed: object = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def runs(self) -> Mapping[str, RunInfo]:
        """Return all runs by their path below the runs folder. The folder is scanned at most once a second.

        A change of the finished runs starts a new analysis in the background.
        """
        with self._lock:
            if time.monotonic() - self._scanned >= _MAX_AGE:
                self._scan()
                self._scanned = time.monotonic()
            return self._runs

    def _scan(self) -> None:
        try:
            found = scan(self.root, cache=self._cache)
            self.problem = ""
        except (OelmError, OSError) as error:
            self.problem = str(error)
            return
        self._runs = {run.path.relative_to(self.root).as_posix(): run for run in found}
        for known in (self._loaded, self._metrics):
            for key in [key for key in known if key not in self._runs]:
                del known[key]
        states = {key: _content(run) for key, run in self._runs.items()}
        if states != self._analysed and (self._thread is None or not self._thread.is_alive()):
            self._analysed = states
            self.progress = Progress(0, len(states))
            self._thread = threading.Thread(
                target=self._analyse, args=(dict(self._runs), states), daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Wait until the analysis of the runs that `runs` has found is complete."""
        self.runs()
        if self._thread is not None:
            self._thread.join()

    def _analyse(self, runs: Mapping[str, RunInfo], states: Mapping[str, object]) -> None:
        warnings: list[LoadWarning] = []
        found = []
        for number, (key, run) in enumerate(runs.items()):
            known = self._loaded.get(key)
            if known is None or known[0] != states[key]:
                known = states[key], _read(run, warnings)
                self._loaded[key] = known
            found.append(known[1])
            self.progress = Progress(number, len(runs))
        loaded = collect(self.root, found, warnings)
        self.verdicts = Verdicts(gather_arms(loaded.runs, self.planned))  # curves need no comparisons
        made = compare_all(loaded, self.planned)
        compared = {(c.kind, c.arm.key, c.reference.id) for c in made.made}
        waiting = (p for p in find_pairs(made.arms) if (p.kind, p.arm.key, p.reference_id) not in compared)
        self.verdicts = Verdicts(made.arms, made.made, tuple(waiting))
        self.progress = None

    def metrics(self, key: str) -> RunMetrics:
        """Return the measurements of a run, after reading what has been appended to its files."""
        run = self._runs[key]
        with self._lock:
            metrics = self._metrics.setdefault(key, RunMetrics())
            metrics.update(run.reader)
        return metrics


def _content(run: RunInfo) -> object:
    """Return what the analysis of a run depends on; it changes if the run has to be read again."""
    file = run.reader.file  # the run folder, or the results file
    stored = isinstance(run.reader, StoredRun)
    return run.state, signature(*([file] if stored else [file / name for name in _READ_BY_ANALYSIS]))


def _read(run: RunInfo, warnings: list[LoadWarning]) -> LoadedRun | None:
    try:
        return read_run(run.reader, warnings)
    except (OelmError, OSError, ValueError):
        return None
