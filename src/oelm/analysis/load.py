"""Run folders to typed records. A folder that cannot be read is named, never skipped in silence.

Only config.yaml, status.json and results.json are parsed here, so a thousand runs load in seconds; the other
files are parsed when asked for, and what is wrong with them joins the same list of warnings. All files of a
finished run are compared with its checksums at once: a run with a damaged file is left out.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oelm.analysis.messages import Message
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError
from oelm.runs.folder import Integrity, RunFolder, audit_holds
from oelm.runs.scan import state_of

FINISHED, DIVERGED, BROKEN, PENDING = "finished", "diverged", "broken", "pending"
FAIRNESS = ("data", "tokenizer", "eval_set", "batch_rows", "steps", "schedule")


@dataclass(frozen=True)
class LoadWarning:
    """Which folder, and what is wrong with it."""

    path: Path
    what: Message

    def __str__(self) -> str:
        return " ".join(f"{self.path}: {self.what}".split())  # on one line, whatever a parser reported


@dataclass(frozen=True)
class Parameters:
    total: int
    trainable: int
    frozen: int
    qk_total: int
    qk_trainable: int


@dataclass(frozen=True)
class RunResult:
    """results.json, checked."""

    metric: str  # "ppl" | "accuracy"
    test: float | None  # None for a tuning trial
    test_n: int
    validation: float | None
    parameters: Parameters
    steps: int
    tokens_seen: int
    lr: float
    checkpoint_bytes: int | None
    fairness: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """One run folder. `result` is there when it finished and its results.json holds water."""

    path: Path
    config: RunConfig
    state: str
    reason: str
    step: int
    total_steps: int
    result: RunResult | None
    warnings: list[LoadWarning] = field(repr=False)
    verified: bool = True  # False for a finished run of an earlier version, which wrote no checksums

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
    def manifest(self) -> dict[str, Any]:
        manifest = self._lazy("manifest.json", RunFolder(self.path).manifest) or {}
        if problem := _manifest_problem(manifest):
            self._warn(Message("{file} cannot be used: {error}", file="manifest.json", error=problem))
            return {}
        return manifest

    @cached_property
    def timing(self) -> dict[str, Any]:
        return self._lazy("timing_stats.json", RunFolder(self.path).timing) or {}

    @cached_property
    def audited(self) -> bool:
        """False when an audit of its frozen tensors was written and did not hold."""
        report = self._lazy("freeze_audit.json", RunFolder(self.path).freeze_audit) or {}
        return audit_holds(report)

    @cached_property
    def command(self) -> str:
        stored = self.manifest.get("command")
        if isinstance(stored, list | tuple):
            return " ".join(map(str, stored))
        command = str(stored or f"oelm train {self.id} --scale {self.config.scale} --seed {self.seed}")
        origin = str((self.manifest.get("data") or {}).get("origin", ""))
        start, end = "local folder ", f"/{self.config.data.dataset}"
        told = "OELM_DATA_DIR" in command or "--data-dir" in command  # manifests did not always say so
        if not told and origin.startswith(start) and origin.endswith(end) and "," not in origin:
            folder = origin.removeprefix(start).removesuffix(end)
            command = f"OELM_DATA_DIR={shlex.quote(folder)} {command}"
        return command

    @cached_property
    def _answers(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(labels, predicted) on the test split."""
        answers = self._lazy("predictions.json", RunFolder(self.path).predictions)
        if answers is None:
            return None
        labels, predicted = answers.get("labels"), answers.get("predicted")
        if isinstance(labels, list) and isinstance(predicted, list) and len(labels) == len(predicted) > 0:
            return np.asarray(labels), np.asarray(predicted)
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

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl of one kind; a broken line ends them with a warning."""
        rows: list[dict[str, Any]] = []
        try:
            rows.extend(r for r in RunFolder(self.path).metrics(kind) if isinstance(r.get("step"), int))
        except (OelmError, OSError, UnicodeDecodeError, AttributeError) as error:
            self._warn(Message("{file} cannot be used: {error}", file="metrics.jsonl", error=str(error)))
        return rows

    def disk_bytes(self) -> int:
        return sum(f.stat().st_size for f in self.path.rglob("*") if f.is_file())

    def _lazy(self, file: str, read: Any) -> dict[str, Any] | None:
        try:
            return read()
        except (OelmError, OSError, UnicodeDecodeError) as error:
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

    @property
    def unverified(self) -> int:
        """How many results count that have no checksums, because an earlier version wrote them."""
        return sum(run.result is not None and not run.verified for run in (*self.runs, *self.trials))


def load_runs(root: Path | str, studies: Iterable[str] = ()) -> Loaded:
    """Every run below `root`, <study>/<ID>/scale=<s>/[tune/lr=<lr>/]seed=<n>, of the given studies or all."""
    root = Path(root)
    if not root.is_dir():
        raise OelmError(
            f"there is no runs folder {root}; run something first (`oelm demo`) or name it with --runs"
        )
    warnings: list[LoadWarning] = []
    wanted = set(studies)
    known = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if missing := wanted - set(known):
        raise OelmError(
            f"no runs of {', '.join(sorted(missing))} in {root}; there are: {', '.join(known) or 'none'}"
        )
    runs: list[LoadedRun] = []
    for study in known:
        if not wanted or study in wanted:
            for pattern in ("*/scale=*/seed=*", "*/scale=*/tune/*/seed=*"):
                found = (
                    read_run(path, warnings) for path in sorted((root / study).glob(pattern)) if path.is_dir()
                )
                runs.extend(run for run in found if run is not None)
    runs = _without_doubles(runs, warnings)
    return Loaded(
        root,
        tuple(r for r in runs if not r.config.tune.trial),
        tuple(r for r in runs if r.config.tune.trial),
        warnings,
    )


def read_run(path: Path, warnings: list[LoadWarning]) -> LoadedRun | None:
    """One folder; None (and a warning) when not even its config can be read."""
    folder = RunFolder(path)

    def warn(what: Message) -> None:
        warnings.append(LoadWarning(path, what))

    try:
        config = folder.config()
    except (OelmError, OSError, UnicodeDecodeError) as error:
        warn(Message("not counted: config.yaml cannot be read ({error})", error=str(error)))
        return None
    try:
        state, status, note = state_of(path)
    except (OSError, UnicodeDecodeError) as error:
        state, status, note = BROKEN, None, str(error)
    if state == BROKEN:
        warn(Message("{file} cannot be used: {error}", file="status.json", error=note))
    result = None
    try:
        raw = folder.results()
        if raw is not None:
            result = _result(raw, config)
            state = FINISHED if state in (BROKEN, PENDING) else state
        elif state != BROKEN and status is not None and _recorded_as_finished(folder):
            warn(Message("status.json says that the run finished, but results.json is missing"))
            state = BROKEN
    except (OelmError, OSError, UnicodeDecodeError, _Unsound) as error:
        warn(Message("{file} cannot be used: {error}", file="results.json", error=str(error)))
        state = BROKEN
    integrity = folder.integrity() if state == FINISHED else Integrity()
    if integrity.damaged:
        warn(
            Message(
                "not counted: files differ from their checksums ({files}). Run it again, or restore the files"
                " from a backup",
                files="; ".join(integrity.damaged),
            )
        )
        if any(problem.startswith(folder.config_file.name) for problem in integrity.damaged):
            return None  # not even which run it is can be believed
        state = BROKEN
    if state != FINISHED:
        result = None  # the best so far of a run that goes on, or that diverged, is not its result
    reason = note or (str(status.reason) if status else "")
    step, total = (status.step, status.total_steps) if status else (0, config.budget.steps)
    run = LoadedRun(path, config, state, reason, step, total, result, warnings, integrity.verified)
    _check_place(run, warn)
    return run


def _recorded_as_finished(folder: RunFolder) -> bool:
    status = folder.recorded_status()
    return status is not None and status.state == FINISHED


class _Unsound(ValueError):
    """A results.json that is JSON but not a result."""


def _result(raw: Mapping[str, Any], config: RunConfig) -> RunResult:
    for name, expected in (("id", config.id), ("seed", config.seed), ("scale", config.scale)):
        if raw.get(name, expected) != expected:
            raise _Unsound(f"'{name}' is {raw.get(name)!r}, config.yaml says {expected!r}")
    metric = raw.get("metric")
    if metric not in ("ppl", "accuracy"):
        raise _Unsound(f"'metric' is {metric!r}, not 'ppl' or 'accuracy'")
    test, validation = raw.get("test"), raw.get("validation")
    counts = _mapping(raw, "parameters")
    names = ("total", "trainable", "frozen", "qk_total", "qk_trainable")
    return RunResult(
        metric=metric,
        test=None if test is None else _score(_mapping(raw, "test"), metric, "test"),
        test_n=0 if test is None else int(_number(_mapping(raw, "test"), "n", "test", default=0)),
        validation=None if validation is None else _score(_mapping(raw, "validation"), metric, "validation"),
        parameters=Parameters(**{n: int(_number(counts, n, "parameters")) for n in names}),
        steps=int(_number(raw, "steps", "")),
        tokens_seen=int(_number(raw, "tokens_seen", "", default=0)),
        lr=float(_number(raw, "lr", "", default=config.optim.lr)),
        checkpoint_bytes=raw["checkpoint_bytes"] if isinstance(raw.get("checkpoint_bytes"), int) else None,
        fairness=_mapping(raw, "fairness"),
    )


def _manifest_problem(manifest: Mapping[str, Any]) -> str:
    """What is wrong with the parts of a manifest that analysis reads; "" when nothing is."""
    data = manifest.get("data", {})
    if not isinstance(data, Mapping):
        return "'data' is not an object"
    for name in ("rows", "tokens", "fingerprints"):
        if not isinstance(data.get(name, {}), Mapping):
            return f"'data.{name}' is not an object"
    rows = data.get("rows", {}).get("train", 0)
    return "" if isinstance(rows, int) else f"'data.rows.train' is {str(rows)[:40]!r}, not a number"


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if not isinstance(value, Mapping):
        raise _Unsound(f"'{name}' is missing or not an object")
    return value


def _number(raw: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = raw.get(name, default)
    place = f"{where}.{name}" if where else name
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unsound(f"'{place}' is {value!r}, not a number")
    if not math.isfinite(value):
        raise _Unsound(f"'{place}' is not finite")
    return value


def _score(raw: Mapping[str, Any], metric: str, where: str) -> float:
    value = float(_number(raw, metric, where))
    if metric == "accuracy" and not 0 <= value <= 1:
        raise _Unsound(f"'{where}.accuracy' is {value}, outside 0 to 1")
    if metric == "ppl" and value < 1:
        raise _Unsound(f"'{where}.ppl' is {value}, below 1")
    if metric == "ppl" and "loss" in raw:
        loss = _number(raw, "loss", where)
        if abs(math.log(value) - loss) > 1e-6 * max(1.0, abs(loss)):
            raise _Unsound(f"'{where}.ppl' is {value}, not exp({where}.loss = {loss})")
    return value


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
