"""What an arm costs: parameters, bytes, memory, and step time where it was measured fairly.

A ratio of step times comes from an interleaved benchmark or not at all: two runs' wall times differ by
what else the machine was doing.
"""

from __future__ import annotations

import json
import math
import statistics as plain_statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.analysis.compare import Arm
from oelm.analysis.load import LoadWarning, Parameters
from oelm.analysis.messages import say


@dataclass(frozen=True)
class StepRatio:
    """Step time of a method over the baseline's, interleaved, with its interval and where it stands."""

    method: str
    model: str
    ratio: float
    interval: tuple[float, float] | None
    bound: float | None  # the ratio that the FLOP model promises
    source: Path


@dataclass(frozen=True)
class Cost:
    parameters: Parameters
    checkpoint_bytes: int | None
    peak_memory_bytes: int | None
    compute_seconds: float
    bound: float | None  # predicted saving of FLOPs per step, as a share
    step: StepRatio | None


def cost(arm: Arm, benchmarks: list[StepRatio]) -> Cost | None:
    """Of an arm with finished runs; medians over its seeds."""
    results = [r.result for r in arm.finished if r.result]
    if not results:
        return None
    timings = [r.timing for r in arm.finished]
    return Cost(
        parameters=results[0].parameters,
        checkpoint_bytes=results[0].checkpoint_bytes,
        peak_memory_bytes=_whole(_median([t.get("peak_memory_bytes") for t in timings])),
        compute_seconds=sum(_finite([t.get("total_wall_time") for t in timings])),
        bound=_median([t.get("predicted_saving") for t in timings]),
        step=next(
            (b for b in benchmarks if b.method == arm.method.name and b.model == arm.config.model.name), None
        ),
    )


def read_benchmarks(folder: Path, warnings: list[LoadWarning]) -> list[StepRatio]:
    """The step ratios of every interleaved benchmark in `folder` (benchmarks/results)."""
    found: list[StepRatio] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            found.extend(_step_ratios(json.loads(path.read_text(encoding="utf-8")), path))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.append(
                LoadWarning(path, say("warn.benchmark", error=f"{type(error).__name__}: {error}"))
            )
    return found


def _step_ratios(raw: Any, path: Path) -> list[StepRatio]:
    """A step benchmark names its arms with `ratio` {value, low, high} to the first arm; others have none."""
    if not isinstance(raw, dict) or raw.get("kind") != "step" or not raw.get("interleaved", False):
        return []
    found = []
    for arm in raw["arms"]:
        ratio = arm.get("ratio")
        if ratio is None or not arm.get("method"):
            continue
        found.append(
            StepRatio(
                method=str(arm["method"]),
                model=str(raw["model"]),
                ratio=float(ratio["value"]),
                interval=(float(ratio["low"]), float(ratio["high"])) if "low" in ratio else None,
                bound=float(arm["flops_ratio"]) if "flops_ratio" in arm else None,
                source=path,
            )
        )
    return found


def _finite(values: list[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _median(values: list[Any]) -> float | None:
    sound = _finite(values)
    return plain_statistics.median(sound) if sound else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
