"""Run a study: check that the settings of its arms are comparable, tune learning rates, run the arms.

arms = Request(select(study="gap"), scales=("mini",), seeds=(0, 1, 2)).arms()
outcome = run_study(arms, "runs", launcher)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oelm.config.run_config import RunConfig, TuneConfig
from oelm.experiments.experiment import stand_ins
from oelm.experiments.fairness import UnequalSetting, check_arms
from oelm.experiments.launch.jobs import Job, Launcher, make_jobs
from oelm.experiments.pilot import pilot_pair, pilot_problems
from oelm.experiments.request import ArmPlan
from oelm.experiments.tuning import Choice, Say, by_comparison, check_run_folders, shared_grid, tune


@dataclass
class StudyOutcome:
    """How the runs of a study ended."""

    jobs: list[Job] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)  # learning rates that tuning chose
    unequal: list[UnequalSetting] = field(default_factory=list)  # settings in which compared arms differ
    problems: list[str] = field(default_factory=list)  # why planned runs were not started


def run_study(
    arms: Sequence[ArmPlan],
    root: Path | str,
    launcher: Launcher,
    *,
    pilot_factor: float = 0.0,
    retry_diverged: bool = False,
    say: Say = print,
) -> StudyOutcome:
    """Run all arms of a study and return how their runs ended.

    Raises UsageError, before anything is trained, if a run folder contains a run with a different config.

    root: the runs folder
    pilot_factor: if it is not 0, one arm and its baseline are run first, as a pilot, with one seed each. The
        other runs start only if the arm is worse than its baseline by at most this factor.
    retry_diverged: let diverged runs continue from their last checkpoint
    say: receives each message for the user
    """
    check_run_folders(arms, root, say=lambda _: None)
    unequal = unequal_settings(arms)
    for setting in unequal:
        say(f"unequal: {setting}")
    for note in dict.fromkeys(note for arm in arms for note in stand_ins(arm.runs[0])):
        say(f"note: {note}")
    if pilot_factor:
        pair = [replace(arm, runs=arm.runs[:1]) for arm in pilot_pair(arms)]
        say(f"pilot: {' and '.join(arm.id for arm in pair)}")
        outcome = run_arms(pair, root, launcher, retry_diverged=retry_diverged, say=say)
        problems = outcome.problems + pilot_problems(pair, outcome.jobs, pilot_factor, say)
        if problems:
            outcome.unequal = unequal
            outcome.problems = [
                f"the pilot failed, so the other runs were not started: {p}" for p in problems
            ]
            for problem in outcome.problems:
                say(problem)
            return outcome
    outcome = run_arms(arms, root, launcher, retry_diverged=retry_diverged, say=say)
    outcome.unequal = unequal
    return outcome


def run_arms(
    arms: Sequence[ArmPlan],
    root: Path | str,
    launcher: Launcher,
    *,
    retry_diverged: bool = False,
    say: Say = print,
) -> StudyOutcome:
    """Run the tuning trials together with the untuned arms, choose learning rates, then run the tuned arms.

    Runs that ended earlier are skipped, so a second call with more seeds runs only the new seeds.
    """

    def launch(configs: Sequence[RunConfig]) -> list[Job]:
        return list(launcher.launch(make_jobs(configs, root, retry_diverged=retry_diverged)))

    fixed = [config for arm in arms if not arm.grid for config in arm.runs]
    tuned = tune(arms, root, launch, along=fixed, say=say)
    outcome = StudyOutcome(tuned.jobs, tuned.choices, problems=tuned.problems)
    if rest := [config for arm in tuned.arms if arm.grid for config in arm.runs]:
        outcome.jobs += launch(rest)
    return outcome


def unequal_settings(arms: Sequence[ArmPlan]) -> list[UnequalSetting]:
    """Return the settings other than the method in which arms differ from their baseline or control.

    Learning rates that will be tuned on the same grid count as equal.
    """
    grids = {key: tuple(shared_grid(group)) for key, group in by_comparison(arms).items()}
    configs = []
    for arm in arms:
        grid = grids[arm.runs[0].compare.group, arm.scale] if arm.grid else ()
        configs.append(replace(arm.runs[0], tune=TuneConfig(grid=grid, seeds=arm.trial_seeds)))
    return check_arms(configs, [arm.id for arm in arms if arm.experiment.published])
