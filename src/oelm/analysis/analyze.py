"""The analysis of a runs folder, as `oelm analyze` and `oelm report` show it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from oelm.analysis.answers import Answer, answers
from oelm.analysis.arms import Arm, Planned
from oelm.analysis.compare import Comparison, Comparisons, compare_all
from oelm.analysis.costs import Cost, StepRatio, cost, read_benchmarks
from oelm.analysis.goal import Goal, goals
from oelm.analysis.load import Loaded, LoadWarning, load_runs
from oelm.analysis.messages import Message
from oelm.analysis.statistics.intervals import Estimate
from oelm.analysis.statistics.mean import Mean, means
from oelm.config.run_config import ArmKey


@dataclass(frozen=True)
class Analysis:
    """The runs of a runs folder, their comparisons and their costs."""

    loaded: Loaded
    comparisons: Comparisons
    benchmarks: list[StepRatio]
    never_started: tuple[str, ...]  # IDs of experiments without a run, in studies that have other runs
    answers: tuple[Answer, ...] = ()  # answers to the questions of study files

    @property
    def warnings(self) -> list[LoadWarning]:
        return list(dict.fromkeys(self.loaded.warnings))

    @property
    def arms(self) -> tuple[Arm, ...]:
        return self.comparisons.arms

    @cached_property
    def costs(self) -> dict[ArmKey, Cost]:
        found = {arm.key: cost(arm, self.benchmarks) for arm in self.arms}
        return {key: c for key, c in found.items() if c is not None}

    @cached_property
    def goals(self) -> list[Goal]:
        return goals(self.comparisons)

    @cached_property
    def means(self) -> list[Mean]:
        return means(self.comparisons)

    @cached_property
    def states(self) -> Counter[str]:
        return Counter(r.state for r in self.loaded.runs)

    @cached_property
    def compute_seconds(self) -> float:
        """The sum of the wall times of all runs and tuning trials."""
        times = (r.timing.total_wall_time for r in (*self.loaded.runs, *self.loaded.trials))
        return sum(t for t in times if isinstance(t, int | float) and math.isfinite(t))

    @cached_property
    def disk_bytes(self) -> int:
        return sum(r.disk_bytes() for r in (*self.loaded.runs, *self.loaded.trials))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `oelm analyze --json`."""
        return {
            "runs_folder": str(self.loaded.root),
            "states": dict(self.states),
            "trials": len(self.loaded.trials),
            "comparisons": [_comparison_fields(c) for c in self.comparisons.made],
            "nothing_lost": [
                {"study": goal.arm.config.study, "scale": goal.arm.config.scale, "id": goal.arm.id}
                | {"outcome": goal.outcome, "missing": list(goal.missing)}
                for goal in self.goals
            ],
            "questions": [_answer_fields(a) for a in self.answers],
            "means": [_mean_fields(m) for m in self.means],
            "arms": [_arm_fields(a, self.costs.get(a.key)) for a in self.arms],
            "waiting": [str(m) for m in self.comparisons.waiting],
            "never_started": list(self.never_started),
            "warnings": [str(w) for w in self.warnings],
            "compute_seconds": self.compute_seconds,
            "disk_bytes": self.disk_bytes,
        }


def analyze(
    root: Path | str,
    studies: Iterable[str] = (),
    benchmarks: Path | str | None = None,
    *,
    planned: Planned,
    ids: Collection[str] | None = None,
) -> Analysis:
    """Load the runs in the runs folder `root`, compare them, and add costs and benchmarks.

    studies: analyse only these studies (default: all)
    benchmarks: folder with results of `oelm bench -o FILE`; None = the costs contain no step times
    planned: configs that the catalogue has for each experiment and scale. They show which runs have a
        different budget than the catalogue, and which experiments have no runs
    ids: analyse only these experiments (default: all)
    """
    loaded = load_runs(root, studies)
    if ids is not None:
        runs, trials = (tuple(r for r in kept if r.id in ids) for kept in (loaded.runs, loaded.trials))
        loaded = replace(loaded, runs=runs, trials=trials)
    ratios = read_benchmarks(Path(benchmarks), loaded.warnings) if benchmarks else []
    comparisons = compare_all(loaded, planned)
    answered = tuple(answers(comparisons.arms, loaded.trials))
    return Analysis(loaded, comparisons, ratios, _never_started(loaded, planned, ids), answered)


def _never_started(loaded: Loaded, planned: Planned, ids: Collection[str] | None) -> tuple[str, ...]:
    """Return the IDs of experiments that have no run, although other experiments of their study have runs."""
    studies = {r.config.study for r in loaded.runs}
    present = {r.id for r in loaded.runs}
    return tuple(
        id
        for id, scales in planned.items()
        if id not in present and (ids is None or id in ids)
        if any(config.study in studies for config in scales.values())
    )


def _comparison_fields(c: Comparison) -> dict[str, Any]:
    return {
        "kind": c.kind,
        "study": c.arm.config.study,
        "scale": c.arm.config.scale,
        "group": c.group,
        "dataset": c.dataset,
        "arm": c.arm.name,
        "id": c.arm.id,
        "reference": c.reference.name,
        "reference_id": c.reference.id,
        "metric": c.metric,
        "difference_points": _estimate_fields(c.effect) if c.metric == "accuracy" else None,
        "ratio": _estimate_fields(c.ratio.exp()) if c.ratio else None,
        "target": asdict(c.target),
        "sign": asdict(c.sign),
        "scenario": asdict(c.scenario) if c.scenario else None,
        "test_error": c.test_error,
        "lr_choice_sd": c.lr_choice_sd,
        "max_seeds": c.max_seeds or None,
        "refused": _texts(c.refused),
        "caveats": _texts(c.caveats),
        "flags": _texts(c.flags),
        "runs": [str(r.path) for r in c.runs],
    }


def _answer_fields(answer: Answer) -> dict[str, Any]:
    c = answer.comparison
    return {
        "study": answer.arm.config.study,
        "scale": answer.arm.config.scale,
        "id": answer.arm.id,
        **asdict(answer.question),
        "ratio": _estimate_fields(c.ratio.exp()) if c and c.ratio else None,
        "verdict": asdict(answer.verdict) if answer.verdict else None,
    }


def _mean_fields(mean: Mean) -> dict[str, Any]:
    c = mean.first
    return {
        "kind": c.kind,
        "study": c.arm.config.study,
        "scale": c.arm.config.scale,
        "arm": c.arm.name,
        "reference": c.reference.name,
        "datasets": [other.dataset for other in mean.comparisons],
        "metric": c.metric,
        "difference_points": _estimate_fields(mean.effect) if c.metric == "accuracy" else None,
        "ratio": _estimate_fields(mean.effect.exp()) if c.metric == "ppl" else None,
        "verdict": asdict(mean.verdict),
    }


def _estimate_fields(e: Estimate | None) -> dict[str, Any] | None:
    return None if e is None else asdict(e)


def _texts(messages: Iterable[Message]) -> list[str]:
    return [str(m) for m in messages]


def _arm_fields(arm: Arm, spent: Cost | None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": arm.id,
        "arm": arm.name,
        "study": arm.config.study,
        "scale": arm.config.scale,
        "architecture": arm.architecture,
        "task": arm.task,
        "scores": {str(seed): value for seed, value in arm.scores.items()},
        "states": {str(r.seed): r.state for r in arm.runs},
    }
    if spent is not None:
        step = spent.step
        out["cost"] = {
            "parameters": asdict(spent.parameters),
            "checkpoint_bytes": spent.checkpoint_bytes,
            "peak_memory_bytes": spent.peak_memory_bytes,
            "predicted_flop_saving": spent.bound,
            "step_time_ratio": None if step is None else {"ratio": step.ratio, "interval": step.interval},
        }
    return out
