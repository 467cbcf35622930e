"""Predict what a study still needs before its questions are answered: runs, time and disk space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oelm.analysis.statistics.sequential import MIN_SEEDS
from oelm.config.run_config import ArmKey
from oelm.errors import UsageError
from oelm.experiments.decide.look import Design, Look
from oelm.experiments.decide.loop import run_seconds
from oelm.experiments.plan import Plan, estimate
from oelm.experiments.request import ArmPlan
from oelm.experiments.tuning import TuningGroup, by_comparison, trial_configs
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.units import duration_text


@dataclass(frozen=True)
class Forecast:
    """The runs, tuning trials, seconds of training and disk space that a study still needs."""

    least_runs: int  # best case: the next look answers every open question
    expected_runs: int | None  # likely case: open questions need `Question.expected` seeds; None if unknown
    most_runs: int  # worst case: every open question needs the maximum number of seeds
    least_seconds: float | None
    expected_seconds: float | None
    most_seconds: float | None
    trials: int  # tuning trials, if no grid of learning rates grows
    trial_seconds: float | None  # time of the tuning trials, which the seconds above do not contain
    disk_bytes: int | None  # best models of `most_runs` runs, and the checkpoints of the one that trains
    most_runs_of: Mapping[ArmKey, int]  # arm -> its part of `most_runs`

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "most_runs_of"}


def plans_of(design: Design, root: Path | str) -> dict[ArmKey, Plan]:
    """Return the `Plan` of every arm: what one run needs (time, disk space and so on).

    Computing a `Plan` takes seconds, so arms that differ only in their method share one.
    """
    known: dict[tuple[object, ...], Plan] = {}
    found = {}
    for key, config in design.by_arm().items():
        alike = (config.task, config.data, config.model, config.budget)
        if alike not in known:
            known[alike] = estimate(config, root)
        found[key] = known[alike]
    return found


def guessed_seconds(plans: Mapping[ArmKey, Plan]) -> dict[ArmKey, float]:
    return {key: plan.seconds for key, plan in plans.items() if plan.seconds}


def forecast(
    design: Design, look: Look, plans: Mapping[ArmKey, Plan], arms: Sequence[ArmPlan], root: Path | str
) -> Forecast:
    """Return how many runs, tuning trials, seconds and bytes the open questions still need.

    plans: what one run of each arm needs (`plans_of()`)
    arms: the arms of the design; some of them may have to be tuned first
    """
    seconds = run_seconds(design, look.seconds, guessed_seconds(plans))
    timed = bool(look.seconds) or all(plan.seconds for plan in plans.values())
    least: dict[ArmKey, int] = {}
    expected: dict[ArmKey, int] = {}
    most: dict[ArmKey, int] = {}
    predicted = True
    for q in look.questions:
        if not q.is_open:
            continue
        predicted = predicted and q.expected is not None
        for arm in (q.arm, q.reference):
            have = sum(seed in arm.ended for seed in look.seeds)
            for counts, wanted in (
                (least, max(MIN_SEEDS, q.n + 1)),
                (expected, q.expected or design.max_seeds),
                (most, design.max_seeds),
            ):
                counts[arm.key] = max(counts.get(arm.key, 0), wanted - have)

    def total(counts: Mapping[ArmKey, int]) -> float | None:
        return sum(n * seconds[key] for key, n in counts.items()) if timed else None

    trials = {} if look.no_verdict_possible else trials_left(arms, root)
    share = {arm.key: arm.experiment.trial_share for arm in arms}
    one_trial = {key: look.trial_seconds.get(key) or share[key] * seconds[key] for key in trials}
    sizes = [(plans[key].kept_bytes, plans[key].disk_bytes, n) for key, n in most.items() if n]
    known = all(kept and peak for kept, peak, _ in sizes)
    disk = sum((kept or 0) * n for kept, _, n in sizes) + max((peak or 0 for _, peak, _ in sizes), default=0)
    return Forecast(
        sum(least.values()),
        sum(expected.values()) if predicted else None,
        sum(most.values()),
        total(least),
        total(expected) if predicted else None,
        total(most),
        sum(trials.values()),
        sum(n * one_trial[key] for key, n in trials.items()) if timed else None,
        disk if known else None,
        most,
    )


def trials_left(arms: Sequence[ArmPlan], root: Path | str) -> dict[ArmKey, int]:
    """Return how many tuning trials of each arm have not ended, if no grid of learning rates grows."""
    left = {}
    for group in by_comparison(arms).values():
        grid = tuple(TuningGroup(group, root, say=lambda _: None).grid)
        for arm in group:
            trials = trial_configs(arm, grid)
            ended = sum(RunFolder(run_path(root, trial)).ended() is not None for trial in trials)
            left[arm.key] = max(0, replace(arm, grid=grid).total_trials - ended)
    return left


def check_budget(budget: float, look: Look, plans: Mapping[ArmKey, Plan]) -> None:
    """Raise UsageError if an open question needs a run that alone takes longer than `budget` seconds."""
    seconds = {**guessed_seconds(plans), **look.seconds}
    for q in look.questions:
        for arm in (q.arm, q.reference):
            time = seconds.get(arm.key)
            if q.is_open and time is not None and time > budget:
                raise UsageError(
                    f"--budget {duration_text(budget)} is shorter than one run of {arm.id}, which takes "
                    f"about {duration_text(time)}; give a larger budget or a smaller --scale"
                )
