"""What an arm costs: parameters, bytes, memory, and step time where it was measured fairly.

A ratio of step times comes from an interleaved benchmark or not at all: two runs' wall times differ by
what else the machine was doing.
"""

from __future__ import annotations

import math
import statistics as plain_statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.analysis.compare import Arm
from oelm.analysis.load import LoadWarning, Parameters
from oelm.analysis.messages import Message
from oelm.errors import OelmError, UsageError
from oelm.files.read import read_json
from oelm.methods.method import Method


@dataclass(frozen=True)
class StepRatio:
    """Step time of a method over the baseline's, interleaved, with its interval and where it stands."""

    method: str
    model: str
    context: int | None
    position: str | None
    ratio: float
    interval: tuple[float, float]
    bound: float | None  # saving that the FLOP model allows, as a share
    source: Path
    fields: dict[str, Any] | None = None  # of the method as it was measured
    memory_ratio: float | None = None  # peak memory over the baseline's
    rounds: int = 0  # interleaved measurements of each method

    def fits(self, arm: Arm) -> bool:
        """Whether it was measured on the arm's own network and method; another one saves another share."""
        config = arm.config
        return (
            self.method == arm.method.name
            and (self.fields is None or self._measured() == arm.method)
            and self.model == config.model.name
            and self.context in (None, config.data.max_length)
            and self.position in (None, config.model.position)
        )

    def _measured(self) -> Method | None:
        """The method of that day; None if it had fields that are no more."""
        try:
            return Method.from_dict(self.fields or {})
        except UsageError:
            return None


@dataclass(frozen=True)
class Cost:
    parameters: Parameters
    checkpoint_bytes: int | None
    peak_memory_bytes: int | None
    compute_seconds: float
    bound: float | None  # predicted saving of FLOPs per step, as a share; that of `step` where there is one
    step: StepRatio | None


def cost(arm: Arm, benchmarks: list[StepRatio]) -> Cost | None:
    """Of an arm with finished runs; medians over its seeds."""
    results = [r.result for r in arm.finished if r.result]
    if not results:
        return None
    timings = [r.timing for r in arm.finished]
    step = next((b for b in benchmarks if b.fits(arm)), None)
    predicted = _median([t.get("predicted_saving") for t in timings])
    return Cost(
        parameters=results[0].parameters,
        checkpoint_bytes=results[0].checkpoint_bytes,
        peak_memory_bytes=_whole(_median([t.get("peak_memory_bytes") for t in timings])),
        compute_seconds=sum(_finite([t.get("total_wall_time") for t in timings])),
        bound=step.bound if step is not None and step.bound is not None else predicted,
        step=step,
    )


def read_benchmarks(folder: Path, warnings: list[LoadWarning]) -> list[StepRatio]:
    """The step ratios of every interleaved benchmark in `folder` (benchmarks/results)."""
    found: list[StepRatio] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            found.extend(_step_ratios(read_json(path), path))
        except (OelmError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.append(
                LoadWarning(
                    path,
                    Message("not a readable benchmark: {error}", error=f"{type(error).__name__}: {error}"),
                )
            )
    return found


def _step_ratios(raw: Any, path: Path) -> list[StepRatio]:
    """The methods of an interleaved step benchmark. Ratios are to its first arm: it must be the baseline."""
    if not isinstance(raw, dict) or raw.get("kind") != "step" or not raw.get("interleaved", False):
        return []
    arms, settings = raw["arms"], raw.get("settings", {})
    if not arms or arms[0].get("method") != "baseline":
        return []
    return [
        StepRatio(
            method=str(arm["method"]),
            model=str(raw["model"]),
            context=settings.get("context"),
            position=settings.get("position"),
            ratio=float(arm["ratio"]["value"]),
            interval=(float(arm["ratio"]["low"]), float(arm["ratio"]["high"])),
            bound=None if arm.get("flops_ratio") is None else 1 - float(arm["flops_ratio"]),
            source=path,
            fields=arm.get("fields"),
            memory_ratio=None if arm.get("memory_ratio") is None else float(arm["memory_ratio"]),
            rounds=int(arm["ratio"].get("rounds", 0)),
        )
        for arm in arms[1:]
        if arm.get("method")
    ]


def _finite(values: list[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _median(values: list[Any]) -> float | None:
    sound = _finite(values)
    return plain_statistics.median(sound) if sound else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
