"""The cost of an arm: parameters, checkpoint size, memory and step time.

Ratios of step times come only from benchmarks that measure all methods several times, in a random order.
The wall times of two runs are not compared, because they also depend on what else the machine was doing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from oelm.analysis.arms import Arm
from oelm.analysis.load import LoadWarning
from oelm.analysis.messages import Message
from oelm.errors import OelmError, UsageError
from oelm.files.read import read_json
from oelm.methods.method import Method
from oelm.runs.schema import ParameterCounts

#: How the methods of a benchmark follow each other. "turns": all are in memory and take turns of some steps;
#: "processes": one process at a time, each with a single method, so two methods are minutes apart.
ORDERS = ("turns", "processes")


@dataclass(frozen=True)
class StepRatio:
    """The step time of a method divided by that of the baseline, from a benchmark with repetitions."""

    method: str
    model: str
    context: int | None
    position: str | None
    ratio: float
    interval: tuple[float, float]
    bound: float | None  # largest possible saving: the fraction of the FLOPs per step that the method saves
    source: Path
    order: str  # one of ORDERS
    fields: dict[str, Any] | None = None  # fields of the `Method` that was measured
    memory_ratio: float | None = None  # peak memory divided by the peak memory of the baseline
    processes: int = 0  # number of processes of each method, over which the interval is computed
    vocabulary: int | None = None
    batch: int | None = None

    def fits(self, arm: Arm) -> bool:
        """Return whether the ratio was measured with the model and the method of this arm."""
        config = arm.config
        return (
            self.method == arm.method.name
            and (self.fields is None or self._measured_method() == arm.method)
            and self.model == config.model.name
            and self.context in (None, config.data.max_length)
            and self.position in (None, config.model.position)
            and self.batch in (None, config.budget.batch_size)
            and self.vocabulary in (None, arm.first.manifest.tokenizer.vocab_size)
        )

    def _measured_method(self) -> Method | None:
        """Return the `Method` with `fields`; None if this version of oelm does not know one of them."""
        try:
            return Method.from_dict(self.fields or {})
        except UsageError:
            return None


@dataclass(frozen=True)
class Cost:
    """What an arm costs; the memory is the median over seeds."""

    parameters: ParameterCounts
    checkpoint_bytes: int | None
    peak_memory_bytes: int | None
    bound: float | None  # fraction of the FLOPs per step that the method saves
    step: StepRatio | None  # the benchmark of this method and model, if there is one


def cost(arm: Arm, benchmarks: list[StepRatio]) -> Cost | None:
    """Return the cost of an arm; None if it has no finished runs."""
    results = arm.results
    if not results:
        return None
    timings = [r.timing for r in arm.finished]
    step = next((b for b in benchmarks if b.fits(arm)), None)
    predicted = _median([t.predicted_saving for t in timings])
    memory = _median([t.peak_memory_bytes for t in timings])
    return Cost(
        parameters=results[0].parameters,
        checkpoint_bytes=results[0].checkpoint_bytes,
        peak_memory_bytes=None if memory is None else int(memory),
        # The saving of the runs follows the method's schedule; a benchmark knows only single steps.
        bound=predicted if predicted is not None or step is None else step.bound,
        step=step,
    )


def read_benchmarks(folder: Path, warnings: list[LoadWarning]) -> list[StepRatio]:
    """Return the step-time ratios of all benchmarks in `folder`.

    For a file whose step times cannot be used, a warning is added to `warnings`.
    """
    found: list[StepRatio] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            raw = read_json(path)
            if not isinstance(raw, dict) or raw.get("kind") != "step":
                continue
            if raw.get("order") in ORDERS:
                found.extend(_step_ratios(raw, path))
            else:
                warnings.append(
                    LoadWarning(
                        path,
                        Message(
                            "this benchmark has no valid 'order' (turns or processes), so its step times are "
                            "not shown: measure it again with `oelm bench`"
                        ),
                    )
                )
        except (OelmError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.append(
                LoadWarning(
                    path,
                    Message(
                        "this benchmark cannot be read, so its step times are not shown: {error}",
                        error=f"{type(error).__name__}: {error}",
                    ),
                )
            )
    return found


def _step_ratios(raw: dict[str, Any], path: Path) -> list[StepRatio]:
    """Return the step time of each method in a step benchmark, divided by that of the baseline.

    The result is empty if the first method is not the baseline.
    """
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
            order=str(raw["order"]),
            fields=arm.get("fields"),
            memory_ratio=None if arm.get("memory_ratio") is None else float(arm["memory_ratio"]),
            processes=int(arm["ratio"].get("processes", 0)),
            vocabulary=settings.get("vocabulary"),
            batch=settings.get("batch"),
        )
        for arm in arms[1:]
        if arm.get("method")
    ]


def _median(values: list[Any]) -> float | None:
    finite = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return median(finite) if finite else None
