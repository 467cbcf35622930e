"""Run a study: plan its arms, check that their settings are comparable, tune learning rates, run the arms.

An arm is one experiment (a method on a dataset) at one scale, with a run for each seed.

arms = Request(select(study="gap"), scales=("mini",), seeds=(0, 1, 2)).arms()
outcome = run_study(arms, "runs", launcher)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oelm.config.limits import check_config
from oelm.config.run_config import RunConfig, Scale
from oelm.errors import OelmError, UsageError
from oelm.experiments.experiment import Experiment, require_folder_name, stand_ins
from oelm.experiments.fairness import UnequalSetting, check_arms
from oelm.experiments.launch.jobs import Job, Launcher, make_jobs
from oelm.experiments.pilot import pilot_pair, pilot_problems
from oelm.experiments.tuning import TRIAL_SEEDS, Choice, choose_lr, trial_configs, with_chosen_lr
from oelm.runs.states import is_terminal

Say = Callable[[str], None]


@dataclass(frozen=True)
class ArmPlan:
    """The plan of one arm: one experiment at one scale, with a config per seed and its tuning trials."""

    experiment: Experiment
    runs: tuple[RunConfig, ...]
    trials: tuple[RunConfig, ...] = ()  # tuning trials, to be run first; () = the learning rate is not tuned

    @property
    def id(self) -> str:
        return self.experiment.id

    @property
    def scale(self) -> Scale:
        return self.runs[0].scale

    @property
    def total_runs(self) -> int:
        return len(self.runs) + len(self.trials)


@dataclass(frozen=True)
class Request:
    """What the user wants to run: experiments, scales, seeds and changed settings."""

    experiments: Sequence[Experiment]
    scales: Sequence[Scale] = ("full",)
    seeds: Sequence[int] = ()  # () = the seeds of each experiment
    changes: Mapping[str, Any] = field(default_factory=dict)  # config field ("budget.steps") -> value
    study: str = ""  # name of the study folder; "" = the study of each experiment
    tune: bool | None = None  # whether to tune the learning rate; None = as the catalogue says
    grid: Sequence[float] = ()  # learning rates to try; () = the experiment's grid
    trial_seeds: Sequence[int] = TRIAL_SEEDS
    data_dir: str = ""

    def __post_init__(self) -> None:
        if self.study:
            require_folder_name(self.study, "a study's name (--as)")
        if self.data_dir and set(self.scales) == {"smoke"} and not self.changes:
            raise UsageError(
                "--data-dir has no effect at smoke scale, where all text is built in; leave it out"
            )

    def arms(self) -> list[ArmPlan]:
        """Return one plan per experiment and scale; raise UsageError if a config is invalid."""
        pairs = [(e, scale) for scale in dict.fromkeys(self.scales) for e in self.experiments]
        kept = [self._arm(e, scale) for e, scale in pairs if scale not in e.left_out_at]
        if pairs and not kept:
            raise UsageError("; ".join(self.left_out()))
        return kept

    def left_out(self) -> list[str]:
        """Return notes for the user: which experiments are not run at one of the scales, and why."""
        ids: dict[tuple[str, str], list[str]] = {}
        for scale in dict.fromkeys(self.scales):
            for e in self.experiments:
                if scale in e.left_out_at:
                    ids.setdefault((scale, e.left_out_at[scale]), []).append(e.id)
        return [f"not run at scale {s}: {', '.join(names)} ({why})" for (s, why), names in ids.items()]

    def _arm(self, e: Experiment, scale: Scale) -> ArmPlan:
        runs = tuple(self.config(e, scale, seed) for seed in dict.fromkeys(self.seeds or e.seeds))
        if not self._tunes(e):
            return ArmPlan(e, runs)
        if "optim.lr" in self.changes:
            raise UsageError(
                f"{e.id}: optim.lr cannot be set, because tuning chooses the learning rate; "
                "use --no-tune to run with this learning rate, or --grid for the learning rates to try"
            )
        grid = tuple(dict.fromkeys(self.grid or e.grid(scale)))
        seeds = tuple(dict.fromkeys(self.trial_seeds))
        return ArmPlan(e, runs, tuple(trial_configs(runs[0], grid, seeds, e.trial_share)))

    def config(self, e: Experiment, scale: Scale, seed: int) -> RunConfig:
        """Return the config of one run; raise UsageError if its settings are invalid."""
        try:
            config = e.at(scale, seed, self.data_dir, self.changes)
            check_config(config, self.data_dir)
        except UsageError as error:
            raise UsageError(f"{e.id}: {error}") from None
        return replace(config, study=self.study or self._study(e))

    def _tunes(self, e: Experiment) -> bool:
        return e.tuned if self.tune is None else self.tune

    def _study(self, e: Experiment) -> str:
        """Return the name of the study folder.

        The runs get a different folder if the user tunes an experiment that the catalogue does not tune, or
        the other way round, because they are not the runs that the catalogue describes.
        """
        if self._tunes(e) == e.tuned:
            return e.study
        return f"{e.study}-{'tuned' if self.tune else 'untuned'}"


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

    root: the runs folder
    pilot_factor: if it is not 0, a pilot runs first: one arm and its baseline, one seed each. The other runs
        start only if the arm is worse than its baseline by at most this factor.
    retry_diverged: let diverged runs continue from their last checkpoint
    say: receives each message for the user
    """
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

    outcome = StudyOutcome(jobs=launch([config for arm in arms for config in (arm.trials or arm.runs)]))
    not_ended = {(job.config.id, job.config.scale) for job in outcome.jobs if not is_terminal(job.state)}
    tuned: list[RunConfig] = []
    for arm in arms:
        if not arm.trials:
            continue
        if (arm.id, arm.scale) in not_ended:
            say(f"{arm.id}: not all tuning trials have ended; run the same command again to continue")
            continue
        try:
            choice = choose_lr(arm.trials, root)
        except OelmError as error:
            outcome.problems.append(str(error))
            say(str(error))
            continue
        outcome.choices.append(choice)
        say(f"tuned {choice}")
        tuned += [with_chosen_lr(config, choice, arm.trials) for config in arm.runs]
    if tuned:
        outcome.jobs += launch(tuned)
    return outcome


def unequal_settings(arms: Sequence[ArmPlan]) -> list[UnequalSetting]:
    """Return the settings other than the method in which arms differ from their baseline or control.

    Learning rates that will be tuned on the same grid count as equal.
    """
    configs = [
        replace(arm.runs[0], tune=replace(arm.trials[0].tune, trial=False)) if arm.trials else arm.runs[0]
        for arm in arms
    ]
    return check_arms(configs, [arm.id for arm in arms if arm.experiment.published])
