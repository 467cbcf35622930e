"""Run folders to typed records. A folder that cannot be read is named, never skipped in silence.

Only config.yaml, status.json and results.json are parsed here, so a thousand runs load in seconds; the other
files are parsed when asked for, and what is wrong with them joins the same list of warnings. All files of a
finished run are compared with its checksums at once: a run with a damaged file is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from oelm.analysis.messages import Message
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError
from oelm.runs.reader import RunReader
from oelm.runs.scan import find_runs, state_of, study_names
from oelm.runs.schema import Fairness, Manifest, MetricsRow, ParameterCounts, Results, TimingStats

FINISHED, DIVERGED, BROKEN, PENDING = "finished", "diverged", "broken", "pending"
T = TypeVar("T")
FAIRNESS = ("data", "tokenizer", "eval_set", "batch_rows", "steps", "schedule")


@dataclass(frozen=True)
class LoadWarning:
    """Which folder, and what is wrong with it."""

    path: Path
    what: Message

    def __str__(self) -> str:
        return " ".join(f"{self.path}: {self.what}".split())  # on one line, whatever a parser reported


@dataclass(frozen=True)
class RunResult:
    """results.json, checked."""

    metric: str  # "ppl" | "accuracy"
    test: float | None  # None for a tuning trial
    test_n: int
    validation: float | None
    parameters: ParameterCounts
    steps: int
    tokens_seen: int
    lr: float
    checkpoint_bytes: int | None
    fairness: Fairness


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """One run folder. `result` is there when it finished and its results.json holds water."""

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
        return self._lazy("manifest.json", self.reader.manifest) or Manifest()

    @cached_property
    def timing(self) -> TimingStats:
        return self._lazy("timing_stats.json", self.reader.timing) or TimingStats()

    @cached_property
    def audited(self) -> bool:
        """False when an audit of its frozen tensors was written and found a fault."""
        audit = self._lazy("freeze_audit.json", self.reader.freeze_audit)
        return audit is None or audit.ok

    @cached_property
    def command(self) -> str:
        fallback = f"oelm train {self.id} --scale {self.config.scale} --seed {self.seed}"
        return self.manifest.command or fallback

    @cached_property
    def _answers(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(labels, predicted) on the test split."""
        answers = self._lazy("predictions.json", self.reader.predictions)
        if answers is None:
            return None
        if len(answers.labels) == len(answers.predicted) > 0:
            return np.asarray(answers.labels), np.asarray(answers.predicted)
        self._warn(
            Message(
                "predictions.json does not hold two lists of equal length; the test-set error is estimated "
                "from the binomial distribution instead"
            )
        )
        return None

    @cached_property
    def most_frequent(self) -> float | None:
        """Classification: share of the test split's most frequent class, what guessing reaches."""
        if self._answers is None:
            return None
        labels = self._answers[0]
        return float(np.unique(labels, return_counts=True)[1].max() / len(labels))

    @cached_property
    def hits(self) -> np.ndarray | None:
        """Classification: per test example, 1 where the prediction is right. None without predictions."""
        if self._answers is None:
            return None
        hits = (self._answers[0] == self._answers[1]).astype(float)
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

    def metrics(self, kind: str) -> list[MetricsRow]:
        """Rows of metrics.jsonl of one kind; a broken line ends them with a warning."""
        rows: list[MetricsRow] = []
        try:
            rows.extend(self.reader.metrics(kind))
        except (OelmError, OSError) as error:
            self._warn(Message("{file} cannot be used: {error}", file="metrics.jsonl", error=str(error)))
        return rows

    def disk_bytes(self) -> int:
        return self.reader.size()

    def _lazy(self, file: str, read: Callable[[], T | None]) -> T | None:
        try:
            return read()
        except (OelmError, OSError) as error:
            self._warn(Message("{file} cannot be used: {error}", file=file, error=str(error)))
            return None

    def _warn(self, what: Message) -> None:
        self.warnings.append(LoadWarning(self.path, what))


@dataclass(frozen=True)
class Loaded:
    """Everything below one runs folder."""

    root: Path
    runs: tuple[LoadedRun, ...]  # judged on the test split
    trials: tuple[LoadedRun, ...]  # points of a learning-rate grid
    warnings: list[LoadWarning]


def load_runs(root: Path | str, studies: Iterable[str] = ()) -> Loaded:
    """Every run below `root`, <study>/<ID>/scale=<s>/[tune/lr=<lr>/]seed=<n>, of the given studies or all."""
    root = Path(root)
    if not root.is_dir():
        raise OelmError(
            f"there is no runs folder {root}; run something first (`oelm demo`) or name it with --runs"
        )
    warnings: list[LoadWarning] = []
    wanted = set(studies)
    known = study_names(root)
    if missing := wanted - set(known):
        raise OelmError(
            f"no runs of {', '.join(sorted(missing))} in {root}; there are: {', '.join(known) or 'none'}"
        )
    runs: list[LoadedRun] = []
    for found in find_runs(root):
        if (not wanted or found.study in wanted) and (run := read_run(found.reader, warnings)) is not None:
            runs.append(run)
    runs = _without_doubles(runs, warnings)
    return Loaded(
        root,
        tuple(r for r in runs if not r.config.tune.trial),
        tuple(r for r in runs if r.config.tune.trial),
        warnings,
    )


def read_run(reader: RunReader, warnings: list[LoadWarning]) -> LoadedRun | None:
    """One run; None (and a warning) when not even its config can be read."""

    def warn(what: Message) -> None:
        warnings.append(LoadWarning(reader.path, what))

    try:
        config = reader.config()
    except (OelmError, OSError) as error:
        warn(Message("not counted: config.yaml cannot be read ({error})", error=str(error)))
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
            warn(Message("status.json says that the run finished, but results.json is missing"))
            state = BROKEN
    except (OelmError, OSError) as error:
        warn(Message("{file} cannot be used: {error}", file="results.json", error=str(error)))
        state = BROKEN
    damage = reader.damage() if state == FINISHED else ()
    if damage:
        warn(
            Message(
                "not counted: files differ from their checksums ({files}). Run it again, or restore the files"
                " from a backup",
                files="; ".join(damage),
            )
        )
        if any(problem.startswith("config.yaml") for problem in damage):
            return None  # not even which run it is can be believed
        state = BROKEN
    if state != FINISHED:
        result = None  # the best so far of a run that goes on, or that diverged, is not its result
    reason = note or (status.reason if status else "")
    step, total = (status.step, status.total_steps) if status else (0, config.budget.steps)
    run = LoadedRun(reader, config, state, reason, step, total, result, warnings)
    _check_place(run, warn)
    return run


def _recorded_as_finished(reader: RunReader) -> bool:
    status = reader.recorded_status()
    return status is not None and status.state == FINISHED


def _result(results: Results, config: RunConfig) -> RunResult:
    for name in ("id", "seed", "scale"):
        said, expected = getattr(results, name), getattr(config, name)
        if said != expected:
            raise OelmError(f"'{name}' is {said!r}, config.yaml says {expected!r}")
    return RunResult(
        metric=results.metric,
        test=results.score("test"),
        test_n=results.test.n if results.test else 0,
        validation=results.score("validation"),
        parameters=results.parameters,
        steps=results.steps,
        tokens_seen=results.tokens_seen,
        lr=results.lr,
        checkpoint_bytes=results.checkpoint_bytes,
        fairness=results.fairness,
    )


def _check_place(run: LoadedRun, warn: Any) -> None:
    """A folder copied or renamed by hand does not say what its path says."""
    config, parts = run.config, run.path.parts
    place = (f"scale={config.scale}", f"seed={config.seed}", config.id)
    for name in place:
        if name not in parts:
            warn(
                Message(
                    "the folder's path does not contain '{expected}', as its config.yaml says. Was the "
                    "folder moved by hand? config.yaml is used",
                    expected=name,
                )
            )


def _without_doubles(runs: list[LoadedRun], warnings: list[LoadWarning]) -> list[LoadedRun]:
    """A run that lies in two folders counts once, and not silently."""
    seen: dict[tuple[Any, ...], LoadedRun] = {}
    for run in runs:
        c = run.config
        key = (c.study, c.id, c.scale, c.seed, c.optim.lr if c.tune.trial else None, c.tune.trial)
        if key in seen:
            warnings.append(
                LoadWarning(
                    run.path,
                    Message(
                        "the same run (study, ID, scale, seed) is also in {other}; only that folder is "
                        "counted",
                        other=str(seen[key].path),
                    ),
                )
            )
        else:
            seen[key] = run
    return list(seen.values())
