"""Read the run folders of a study and answer its questions; nothing is written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from oelm.analysis.arms import Arm, Planned
from oelm.analysis.load import PENDING, Loaded, LoadedRun, load_runs
from oelm.analysis.questions import NO_VERDICT, RULES, Question, answer_questions
from oelm.config.diff import diff_lines
from oelm.config.run_config import ArmKey, QuestionConfig, RunConfig, TuneConfig
from oelm.errors import UsageError
from oelm.experiments.tuning import may_choose
from oelm.runs.folder import RunFolder, changed_questions
from oelm.runs.layout import run_path
from oelm.runs.scan import study_names


@dataclass(frozen=True)
class Design:
    """The arms of a study and the rules of its decisions.

    The design must be fixed before the first run, because the error rate of the verdicts depends on it.
    """

    configs: tuple[RunConfig, ...]  # one per arm, with its final learning rate; the field `seed` is ignored
    max_seeds: int = 20
    rules: tuple[str, ...] = RULES
    planned: Planned | None = None  # configs that the catalogue has for each experiment and scale
    trial_seeds: tuple[int, ...] = ()  # seeds of tuning trials, which other runs must not use
    untuned: Mapping[ArmKey, TuneConfig] = field(default_factory=dict)  # how arms will be tuned

    def by_arm(self) -> dict[ArmKey, RunConfig]:
        return {config.arm_key: config for config in self.configs}


@dataclass(frozen=True)
class Look:
    """The questions of a study with their present answers, and the training time of the runs so far."""

    questions: tuple[Question, ...]
    seeds: tuple[int, ...]  # the `max_seeds` seeds of the design, in the order in which they are used
    seconds: Mapping[ArmKey, float]  # mean time of the finished runs of an arm; only arms with such runs
    trial_seconds: Mapping[ArmKey, float]  # mean time of the finished tuning trials of an arm, likewise
    spent_seconds: float  # time of all runs and tuning trials of these arms
    runs_before: int = 0  # finished runs that were trained before `max_seeds` was fixed, as by `oelm run`

    @property
    def no_verdict_possible(self) -> bool:
        """Whether it is known before the first run that no question can get a verdict."""
        return all(q.state == NO_VERDICT and not q.n for q in self.questions)


def look_at(design: Design, root: Path | str) -> Look:
    """Read the run folders below `root`, and return the answers to the questions of the study."""
    loaded = _load(root, {c.study for c in design.configs})
    return look_at_runs(design, loaded)


def look_at_runs(design: Design, loaded: Loaded) -> Look:
    """Return the answers that loaded runs give to the questions of a study, and what its runs took.

    Raise UsageError if the runs were made for other questions or another largest number of seeds.
    """
    arms = [_arm(config, loaded, design.planned or {}) for config in _as_tuned(design, loaded)]
    for arm, config in zip(arms, design.configs, strict=True):
        _check_same_design(arm, design.max_seeds, config.compare.questions)
    existing = {r.seed for arm in arms for r in arm.runs if r.state != PENDING}
    seeds = seed_order(existing, design.max_seeds, design.trial_seeds)
    questions = answer_questions(arms, seeds, design.max_seeds, design.rules)
    own = {arm.key for arm in arms}
    trials = [t for t in loaded.trials if t.config.arm_key in own]
    finished_trials: dict[ArmKey, list[LoadedRun]] = {key: [] for key in own}
    for trial in (t for t in trials if t.result):
        finished_trials[trial.config.arm_key].append(trial)
    runs = [r for arm in arms for r in arm.runs if r.state != PENDING]
    return Look(
        tuple(questions),
        tuple(seeds),
        {arm.key: float(np.mean(times)) for arm in arms if (times := _times(arm.finished))},
        {key: float(np.mean(times)) for key in own if (times := _times(finished_trials[key]))},
        sum(_times([*runs, *trials])),
        sum(not run.config.compare.max_seeds for arm in arms for run in arm.finished),
    )


def seed_order(existing: Iterable[int], count: int, trial_seeds: Collection[int] = ()) -> list[int]:
    """Return `count` seeds: first those in `existing`, which have runs already, then the next larger numbers.

    Seeds of tuning trials are left out.

    >>> seed_order([], 4), seed_order([1, 2, 5], 5), seed_order([], 3, trial_seeds=[0, 1])
    ([0, 1, 2, 3], [1, 2, 5, 6, 7], [2, 3, 4])
    """
    known = sorted(set(existing) - set(trial_seeds))
    following = (s for s in itertools.count(known[-1] + 1 if known else 0) if s not in trial_seeds)
    return [*known, *itertools.islice(following, max(0, count - len(known)))][:count]


def _load(root: Path | str, studies: set[str]) -> Loaded:
    present = studies & set(study_names(root)) if Path(root).is_dir() else set()
    return load_runs(root, present) if present else Loaded(Path(root), (), (), [])


def _as_tuned(design: Design, loaded: Loaded) -> Iterator[RunConfig]:
    """Yield the configs of the design; those of arms that are not tuned yet say how they will be tuned.

    If other arms of the comparison have runs, that is how these were tuned. Without this, arms would seem to
    be tuned differently, or to have unequal learning rates, and their questions would get no verdict.
    """
    trained = {(r.config.study, r.config.scale, r.config.compare.group): r.config for r in loaded.runs}
    for config in design.configs:
        other = trained.get((config.study, config.scale, config.compare.group))
        tune = design.untuned.get(config.arm_key)
        yield replace(config, tune=other.tune if other else tune) if tune else config


def _arm(config: RunConfig, loaded: Loaded, planned: Planned) -> Arm:
    """Return the arm of `config` with its runs; if it has none, with one placeholder in state "pending"."""
    runs = [r for r in loaded.runs if r.config.arm_key == config.arm_key]
    if not runs:
        reader = RunFolder(run_path(loaded.root, config))
        runs = [LoadedRun(reader, config, PENDING, "", 0, 0, None, [])]
    return Arm(tuple(sorted(runs, key=lambda r: r.seed)), planned.get(config.id, {}))


def check_settings(design: Design, root: Path | str) -> None:
    """Raise UsageError if a run below `root` was trained with different settings than the design has.

    The learning rate of an arm that is not tuned yet is not compared, and its grid may still grow.
    """
    wanted = design.by_arm()
    for run in _load(root, {c.study for c in design.configs}).runs:
        config = wanted.get(run.config.arm_key)
        if config and (asked := design.untuned.get(config.arm_key)):
            tune = run.config.tune if may_choose(run.config.tune, asked.grid, asked.seeds) else asked
            config = replace(config, optim=replace(config.optim, lr=run.config.optim.lr), tune=tune)
        lines = diff_lines(run.config, replace(config, seed=run.seed)) if config else []
        if lines:
            listed = "\n".join(lines)
            raise UsageError(
                f"{run.path} was trained with different settings (setting: trained -> requested):\n{listed}\n"
                "Use the same settings, or store new runs under a different study name with --as NAME."
            )


def _check_same_design(arm: Arm, max_seeds: int, questions: Sequence[QuestionConfig]) -> None:
    if any(r.config.compare.questions != questions for r in arm.runs):
        raise changed_questions(arm.id, arm.first.path.parent)
    others = {r.config.compare.max_seeds for r in arm.runs} - {0, max_seeds}
    if others:
        raise UsageError(
            f"--max-seeds is {max_seeds}, but the runs of {arm.id} were started with {max(others)}. It must "
            "not change after the first results, because the error rate of the verdicts depends on it: use "
            f"--max-seeds {max(others)}, or store new runs under a different study name with --as NAME"
        )


def _times(runs: Sequence[LoadedRun]) -> list[float]:
    times = [run.timing.total_wall_time for run in runs]
    return [t for t in times if t is not None and math.isfinite(t)]
