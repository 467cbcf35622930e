"""The whole of `oelm decide`: tune the arms of a study, then add seeds until its questions are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from oelm.config.run_config import ArmKey, RunConfig, TuneConfig
from oelm.errors import OelmError
from oelm.experiments.catalogue import planned_configs
from oelm.experiments.decide.look import Design, check_settings, look_at
from oelm.experiments.decide.loop import DecideOutcome, Say, decide_study, lock_studies, record_progress
from oelm.experiments.launch.jobs import Job, Launcher, make_jobs
from oelm.experiments.request import ArmPlan
from oelm.experiments.study import unequal_settings
from oelm.experiments.tuning import by_comparison, shared_grid, tune
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path


def make_design(arms: Sequence[ArmPlan], max_seeds: int, rules: Sequence[str]) -> Design:
    """Return the design that decides about these arms."""
    trial_seeds = dict.fromkeys(seed for arm in arms for seed in arm.trial_seeds)
    configs = tuple(arm.runs[0] for arm in arms)
    untuned = {
        arm.key: TuneConfig(grid=tuple(shared_grid(group)), seeds=arm.trial_seeds)
        for group in by_comparison(arms).values()
        for arm in group
        if not arm.runs[0].tune.grid
    }
    return Design(configs, max_seeds, tuple(rules), planned_configs(), tuple(trial_seeds), untuned)


def tune_and_decide(
    arms: Sequence[ArmPlan],
    design: Design,
    root: Path | str,
    launcher: Launcher,
    *,
    width: int,
    budget: float = float("inf"),
    guess: Mapping[ArmKey, float] | None = None,
    say: Say = print,
) -> DecideOutcome:
    """Tune the arms, then train seeds until no question is open, the budget is spent, or the user stops it.

    design: the design of these arms (`make_design()`), with the learning rates before tuning
    width, budget, guess: as in `decide_study()`
    """

    def launch(configs: Sequence[RunConfig]) -> Sequence[Job]:
        return launcher.launch(make_jobs(configs, root))

    def affordable(trials: Sequence[RunConfig]) -> list[RunConfig]:
        return affordable_trials(trials, arms, design, root, budget, guess or {})

    with lock_studies(design, root):
        check_settings(design, root)
        for setting in unequal_settings(arms):
            say(f"unequal: {setting}")
        look = look_at(design, root)
        record_progress(look, design, root)
        if look.no_verdict_possible:  # tuning would be in vain
            return DecideOutcome(look)
        tuned = tune(arms, root, launch, affordable=affordable, say=say)
        trials = [job for job in tuned.jobs if not job.ended_before]
        if tuned.stopped:
            return DecideOutcome(look_at(design, root), trials, tuned.stopped, tuned.choices)
        if tuned.problems:
            raise OelmError("; ".join(tuned.problems))
        final = make_design(tuned.arms, design.max_seeds, design.rules)
        outcome = decide_study(final, root, launcher, width=width, budget=budget, guess=guess, say=say)
        return DecideOutcome(outcome.look, [*trials, *outcome.jobs], outcome.stopped, tuned.choices)


def affordable_trials(
    trials: Sequence[RunConfig],
    arms: Sequence[ArmPlan],
    design: Design,
    root: Path | str,
    budget: float,
    guess: Mapping[ArmKey, float],
) -> list[RunConfig]:
    """Return the first of these trials, up to one that would exceed the budget; ended trials cost nothing.

    A trial is expected to take as long as the finished trials of its arm, or if there are none, of the other
    arms; before the first, its share of what a run takes.
    """
    if budget == float("inf"):
        return list(trials)
    look = look_at(design, root)
    shares = {arm.key: arm.experiment.trial_share for arm in arms}
    measured = look.trial_seconds
    mean = sum(measured.values()) / len(measured) if measured else 0.0
    left, fitting = budget - look.spent_seconds, []
    for trial in trials:
        if RunFolder(run_path(root, trial)).ended() is None:
            key = trial.arm_key
            run = look.seconds.get(key) or guess.get(key) or 0.0
            left -= measured.get(key) or mean or run * shares[key]
            if left < 0:
                break
        fitting.append(trial)
    return fitting
