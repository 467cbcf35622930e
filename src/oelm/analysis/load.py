"""Load run folders as typed objects. A folder that cannot be read causes a warning, never an error.

Only config.yaml, status.json and results.json are read immediately, so that a thousand runs load in seconds.
The other files are read when they are first used; if this fails, it also causes a warning. All files of a
finished run are compared with their checksums; if one is damaged, comparisons do not use the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from oelm.analysis.messages import Message
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError
from oelm.runs.reader import RunReader
from oelm.runs.scan import find_runs, require_runs_folder, state_of, study_names
from oelm.runs.schema import Fairness, Manifest, ParameterCounts, Results, TimingStats
from oelm.runs.states import DIVERGENCE

FINISHED, DIVERGED, BROKEN, PENDING = "finished", "diverged", "broken", "pending"
T = TypeVar("T")


@dataclass(frozen=True)
class LoadWarning:
    """A problem with the files of one run."""

    path: Path
    what: Message

    def __str__(self) -> str:
        return " ".join(f"{self.path}: {self.what}".split())  # one line, even if a parser's error has several


@dataclass(frozen=True)
class RunResult:
    """The content of results.json that comparisons use."""

    metric: str  # "ppl" or "accuracy"
    test: float | None  # test score; None for a tuning trial
    test_n: int  # number of test examples or tokens; 0 for a tuning trial
    validation: float | None
    validation_loss: float  # infinite if there is none
    parameters: ParameterCounts
    checkpoint_bytes: int | None
    fairness: Fairness


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """One run, read from its folder; `result` is None unless the run has finished with valid results."""

    reader: RunReader
    config: RunConfig
    state: str
    reason: str
    step: int
    total_steps: int
    result: RunResult | None
    warnings: list[LoadWarning] = field(repr=False)

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def arm(self) -> str:
        return self.config.compare.arm or self.config.method.name

    @cached_property
    def manifest(self) -> Manifest:
        return self._read("manifest.json", self.reader.manifest) or Manifest()

    @cached_property
    def timing(self) -> TimingStats:
        return self._read("timing_stats.json", self.reader.timing) or TimingStats()

    @cached_property
    def audited(self) -> bool:
        """False if the run's freeze audit failed; True if the audit passed or is missing."""
        audit = self._read("freeze_audit.json", self.reader.freeze_audit)
        return audit is None or audit.ok

    @property
    def command(self) -> str:
        """The command line that trains this run again."""
        default = f"oelm train {self.id} --scale {self.config.scale} --seed {self.seed}"
        return self.manifest.command or default

    @cached_property
    def most_frequent(self) -> float | None:
        """The fraction of the most frequent class in the test split; None if the run has no predictions."""
        if self._predictions is None:
            return None
        labels, _ = self._predictions
        return float(np.unique(labels, return_counts=True)[1].max() / len(labels))

    @cached_property
    def hits(self) -> np.ndarray | None:
        """Array with 1 for each correctly predicted test example, else 0; None without valid predictions."""
        if self._predictions is None:
            return None
        labels, predicted = self._predictions
        hits = (labels == predicted).astype(float)
        stated = self.result.test if self.result else None
        if stated is not None and abs(float(hits.mean()) - stated) > 1e-6:
            self._warn(
                Message(
                    "predictions.json gives an accuracy of {predicted}, but results.json says {stated}; the "
                    "predictions are not used",
                    predicted=f"{hits.mean():.6f}",
                    stated=f"{stated:.6f}",
                )
            )
            return None
        return hits

    @cached_property
    def _predictions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The labels and the predicted classes of the test split; None if they are missing or damaged."""
        stored = self._read("predictions.json", self.reader.predictions)
        if stored is None:
            return None
        if len(stored.labels) == len(stored.predicted) > 0:
            return np.asarray(stored.labels), np.asarray(stored.predicted)
        self._warn(
            Message(
                "predictions.json does not contain two lists of equal length; the test-set error is "
                "estimated from the binomial distribution instead"
            )
        )
        return None

    @cached_property
    def test_losses(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Number of target tokens and summed loss of each test document; None if missing or damaged."""
        stored = self._read("test_losses.json", self.reader.test_losses)
        if stored is None or self.result is None or not self.result.test:
            return None
        try:
            tokens, losses = (np.asarray(values, dtype=float) for values in (stored.tokens, stored.losses))
        except OverflowError:  # a damaged file may have a number with hundreds of digits
            tokens = losses = np.empty(0)
        n, stated = self.result.test_n, math.log(self.result.test)
        if len(tokens) == len(losses) > 0 and tokens.min() > 0 and tokens.sum() == n:
            # The mean of these losses may differ a little from the one in results.json: test_losses.json has
            # three decimals, and the sum was computed in a different order.
            tolerance = 1e-5 * max(1.0, stated) + 1e-3 * len(losses) / n
            if abs(float(losses.sum()) / n - stated) <= tolerance:
                return tokens, losses
        self._warn(
            Message(
                "test_losses.json does not add up to the loss and the {n} tokens of results.json; the "
                "interval does not cover the choice of test text",
                n=n,
            )
        )
        return None

    def disk_bytes(self) -> int:
        return self.reader.size()

    def _read(self, file: str, read: Callable[[], T | None]) -> T | None:
        try:
            return read()
        except (OelmError, OSError) as error:
            self._warn(_unusable(file, error))
            return None

    def _warn(self, what: Message) -> None:
        self.warnings.append(LoadWarning(self.path, what))


@dataclass(frozen=True)
class Loaded:
    """All runs of a runs folder, and the problems that were found in their files."""

    root: Path
    runs: tuple[LoadedRun, ...]
    trials: tuple[LoadedRun, ...]  # learning-rate tuning trials, which have no test score
    warnings: list[LoadWarning]


def load_runs(root: Path | str, studies: Iterable[str] = ()) -> Loaded:
    """Load the runs in the runs folder `root` that belong to `studies` (default: all studies)."""
    root = Path(root)
    require_runs_folder(root)
    wanted, known = set(studies), study_names(root)
    if missing := wanted - set(known):
        raise UsageError(
            f"{root} has no runs of the study {', '.join(map(repr, sorted(missing)))}; "
            f"choose a study that has runs there: {', '.join(known) or 'none'}"
        )
    warnings: list[LoadWarning] = []
    found = [f for f in find_runs(root) if not wanted or f.study in wanted]
    return collect(root, [read_run(f.reader, warnings) for f in found], warnings)


def collect(root: Path, found: Iterable[LoadedRun | None], warnings: list[LoadWarning]) -> Loaded:
    """Return a `Loaded` with these runs, in which tuning trials are separated from the other runs.

    found: results of `read_run()`; None values and copies of the same run are dropped
    """
    runs = _drop_copies([run for run in found if run is not None], warnings)
    return Loaded(
        root,
        tuple(r for r in runs if not r.config.tune.trial),
        tuple(r for r in runs if r.config.tune.trial),
        warnings,
    )


def read_run(reader: RunReader, warnings: list[LoadWarning]) -> LoadedRun | None:
    """Load one run; if its config is unreadable or damaged, add a warning and return None."""

    def warn(what: Message) -> None:
        warnings.append(LoadWarning(reader.path, what))

    try:
        config = reader.config()
    except (OelmError, OSError) as error:
        warn(Message("the run is not counted: config.yaml cannot be read ({error})", error=str(error)))
        return None
    state, status, note = state_of(reader)
    if state == BROKEN:
        warn(Message("{file} cannot be used: {error}", file="status.json", error=note))
    result = None
    try:
        results = reader.results()
        if results is not None:
            result = _result(results, config)
            state = FINISHED if state in (BROKEN, PENDING) else state
        elif state != BROKEN and status is not None and _recorded_as_finished(reader):
            warn(
                Message(
                    "the run is not counted: status.json says that it finished, but results.json is missing. "
                    "Run it again"
                )
            )
            state = BROKEN
    except (OelmError, OSError) as error:
        warn(_unusable("results.json", error))
        state = BROKEN
    if state in (BROKEN, PENDING) and _diverged(reader):
        state = DIVERGED
    damage = reader.damage() if state == FINISHED else {}
    if damage:
        warn(
            Message(
                "the run is not counted: files differ from their checksums ({files}). Run it again, or "
                "restore the files from a backup",
                files="; ".join(damage.values()),
            )
        )
        if "config.yaml" in damage:
            return None  # the damaged config may describe a different run
        state = BROKEN
    for part in _missing_in_path(reader.path, config):
        warn(
            Message(
                "the folder's path does not contain '{expected}', as its config.yaml says. Was the folder "
                "moved by hand? config.yaml is used",
                expected=part,
            )
        )
    return LoadedRun(
        reader,
        config,
        state,
        note or (status.reason if status else ""),
        status.step if status else 0,
        status.total_steps if status else config.budget.steps,
        result if state == FINISHED else None,  # an unfinished run may have preliminary results
        warnings,
    )


def _diverged(reader: RunReader) -> bool:
    """Return whether metrics.jsonl ends with the event that the run diverged. status.json may be damaged."""
    last = None
    try:
        for row in reader.metrics():
            last = row
    except (OelmError, OSError):
        return False
    return last is not None and last.kind == "event" and str(last.values.get("text")).startswith(DIVERGENCE)


def _recorded_as_finished(reader: RunReader) -> bool:
    status = reader.recorded_status()
    return status is not None and status.state == FINISHED


def _result(results: Results, config: RunConfig) -> RunResult:
    for name in ("id", "seed", "scale"):
        stated, expected = getattr(results, name), getattr(config, name)
        if stated != expected:
            raise OelmError(
                f"results.json says {name} {stated!r}, but config.yaml says {expected!r}; "
                "one of the files belongs to another run"
            )
    return RunResult(
        metric=results.metric,
        test=results.score("test"),
        test_n=results.test.n if results.test else 0,
        validation=results.score("validation"),
        validation_loss=results.validation.loss if results.validation else math.inf,
        parameters=results.parameters,
        checkpoint_bytes=results.checkpoint_bytes,
        fairness=results.fairness,
    )


def _missing_in_path(path: Path, config: RunConfig) -> list[str]:
    """Return the folder names (study, ID, scale, seed) of the config that are missing in `path`."""
    expected = (f"scale={config.scale}", f"seed={config.seed}", config.id, config.study)
    parts = path.parts[-6 if config.tune.trial else -4 :]  # the part that `run_path()` makes
    return [part for part in expected if part not in parts]


def _drop_copies(runs: Sequence[LoadedRun], warnings: list[LoadWarning]) -> list[LoadedRun]:
    """Return the runs without copies, and add a warning for each copy.

    Of several folders with the same run, the one at the path of its config counts, otherwise a finished one.
    """
    same: dict[tuple[object, ...], list[LoadedRun]] = {}
    for run in runs:
        c = run.config
        key = (c.study, c.id, c.scale, c.seed, c.optim.lr if c.tune.trial else None, c.tune.trial)
        same.setdefault(key, []).append(run)
    counted = []
    for copies in same.values():
        best = min(copies, key=lambda r: (bool(_missing_in_path(r.path, r.config)), r.state != FINISHED))
        counted.append(best)
        for copy in copies:
            if copy is not best:
                what = Message(
                    "the same run (study, ID, scale, seed) is also in {other}; only that folder is counted",
                    other=str(best.path),
                )
                warnings.append(LoadWarning(copy.path, what))
    return counted


def _unusable(file: str, error: Exception) -> Message:
    return Message("{file} cannot be used: {error}", file=file, error=str(error))
