"""Tune learning rates by successive halving, with a grid that grows if the best value is at its edge.

A trial is a run that is used only to choose a learning rate. It is shorter than a run
(`Experiment.trial_share`), has a seed that no other run uses, and never reads the test split. The arms of a
comparison are tuned together, on the same grid:

1. Every learning rate of the grid is tried with the first trial seed.
2. The better half of the learning rates (at least two) is tried with the other trial seeds.
3. The learning rate with the lowest mean validation loss is chosen. The loss is used rather than the
   accuracy, because on a few hundred validation examples accuracy differences are mostly noise.
4. If the choice of any arm is the smallest or largest learning rate, a smaller or larger one is added to the
   grid of all arms. Trials that have ended are not repeated. Once an arm of the comparison has runs, the grid
   does not grow any more, because all arms must have the same grid.

With two trial seeds and trials of half the length of a run, tuning costs at most as much as one run for each
learning rate. The trials that have ended determine which are still needed, so a restarted command continues
where it stopped.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from oelm.analysis.statistics.lr_choice import choice_probabilities, choice_sd, compared, trial_sd
from oelm.config.run_config import RunConfig, Scale, TuneConfig
from oelm.errors import OelmError
from oelm.experiments.launch.jobs import Job, check_folders
from oelm.experiments.request import ArmPlan, finalists
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.states import is_terminal

MAX_EXTENSIONS = 3  # how many learning rates may be added to a grid

Say = Callable[[str], None]
Launch = Callable[[Sequence[RunConfig]], Sequence[Job]]


@dataclass(frozen=True)
class Choice:
    """The learning rate chosen for one arm, and the validation losses of the trials that decided it."""

    id: str
    lr: float
    losses: Mapping[float, Sequence[float]]  # learning rate -> loss with each trial seed; inf = diverged
    # `repeated`: probability that new trials would choose the same learning rate. `sd`: standard deviation of
    # the validation loss over the learning rates that new trials might choose. None = too few trials to tell.
    repeated: float | None = None
    sd: float | None = None

    @property
    def at_edge(self) -> bool:
        """Whether the chosen learning rate is the smallest or largest of a grid (of at least three)."""
        return len(self.losses) > 2 and self.lr in (min(self.losses), max(self.losses))

    def __str__(self) -> str:
        tried = ", ".join(
            f"{lr:g}: {' and '.join(f'{loss:.4f}' for loss in losses)}" for lr, losses in self.losses.items()
        )
        text = f"{self.id}: learning rate {self.lr:g}; validation losses {tried}"
        if self.repeated is not None and self.sd is not None:
            text += f"; new trials would choose it in {100 * self.repeated:.0f} % of cases, and the choice "
            text += f"varies the loss by {self.sd:.4f} (standard deviation)"
        return text + ("; at the edge of the grid, so a better one may lie outside" if self.at_edge else "")

    def to_dict(self) -> dict[str, Any]:
        losses = {f"{lr:g}": [x if math.isfinite(x) else None for x in v] for lr, v in self.losses.items()}
        facts = {"id": self.id, "lr": self.lr, "losses": losses, "at_edge": self.at_edge}
        return {**facts, "repeated": self.repeated, "sd": self.sd}


@dataclass
class Tuned:
    """The result of tuning."""

    arms: list[ArmPlan] = field(default_factory=list)  # learning rate chosen, or fixed
    choices: list[Choice] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # why arms have no learning rate although trials ended
    stopped: str = ""  # why trials have not ended: "budget", "interrupted" or "failed"; "" if all have


def tune(
    arms: Sequence[ArmPlan],
    root: Path | str,
    launch: Launch,
    *,
    along: Sequence[RunConfig] = (),
    affordable: Callable[[Sequence[RunConfig]], Sequence[RunConfig]] | None = None,
    say: Say = print,
) -> Tuned:
    """Run tuning trials until every arm that is to be tuned has a learning rate.

    launch: trains runs until they have ended or the user stops it
    along: runs that need no tuning, to be trained together with the first trials
    affordable: returns those of the given trials that fit into the user's budget
    """
    tuned = Tuned([arm for arm in arms if not arm.grid])
    groups = [TuningGroup(group, root, say) for group in by_comparison(arms).values()]
    launched: set[Path] = set()
    while True:
        batch = [t for group in groups for t in group.trials() if run_path(root, t) not in launched]
        fitting = affordable(batch) if affordable and batch else batch
        if batch and not fitting:
            tuned.stopped = "budget"
            return tuned
        if fitting or along:
            launched |= {run_path(root, t) for t in fitting}
            jobs, along = list(launch([*fitting, *along])), ()
            tuned.jobs += jobs
            stuck = [job for job in jobs if job.config.tune.trial and not is_terminal(job.state)]
            if stuck:
                failed = any(job.state == "failed" for job in stuck)
                tuned.stopped = "failed" if failed else "interrupted"
                groups = [group for group in groups if not group.drop(stuck)]
            continue
        if not [group for group in groups if group.grow()]:
            break
    for group in groups:
        group.conclude(tuned)
    return tuned


def by_comparison(arms: Sequence[ArmPlan]) -> dict[tuple[str, Scale], list[ArmPlan]]:
    """Return those of `arms` that are to be tuned, grouped by (group of compared arms, scale)."""
    groups: dict[tuple[str, Scale], list[ArmPlan]] = {}
    for arm in arms:
        if arm.grid:
            groups.setdefault((arm.runs[0].compare.group, arm.scale), []).append(arm)
    return groups


def check_run_folders(arms: Sequence[ArmPlan], root: Path | str, say: Say) -> list[TuningGroup]:
    """Return the groups of arms that are to be tuned; raise UsageError if a run does not fit its folder.

    Nothing is written. The runs of tuned arms are compared without the learning rate if it is not known yet.
    """
    groups = [TuningGroup(group, root, say) for group in by_comparison(arms).values()]
    tuned = [run for group in groups for run in group.runs_if_tuned()]
    trials = [trial for group in groups for trial in group.trials()]
    check_folders([*trials, *(run for arm in arms if not arm.grid for run in arm.runs), *tuned], root)
    return groups


def may_choose(tune: TuneConfig, grid: Sequence[float], seeds: Sequence[int]) -> bool:
    """Return whether tuning with trial seeds `seeds` that starts with `grid` can end with that of `tune`."""
    return tune.seeds == tuple(seeds) and set(grid) <= set(tune.grid)


def shared_grid(arms: Sequence[ArmPlan]) -> list[float]:
    """Return the learning rates that all arms of a comparison try first."""
    return sorted({lr for arm in arms for lr in arm.grid})


class TuningGroup:
    """The arms of one comparison at one scale, which are tuned on the same grid of learning rates."""

    def __init__(self, arms: Sequence[ArmPlan], root: Path | str, say: Say = print) -> None:
        self.arms, self.root, self.say = arms, root, say
        self.name = arms[0].runs[0].compare.group
        asked = shared_grid(arms)
        recorded = self._recorded_grid(asked)
        self.grid = recorded or asked
        self.max_size = len(asked) + MAX_EXTENSIONS if not recorded else 0  # the grid grows up to this size
        if recorded and recorded != asked:
            say(
                f"{self.name}: the learning rates are {_listed(recorded)}, as for the runs that exist already"
            )

    def trials(self) -> list[RunConfig]:
        """Return the trials that are needed as far as is known now, including those that have ended."""
        return [trial for arm in self.arms for trial in self._trials_of(arm)]

    def grow(self) -> bool:
        """Add a learning rate below or above the grid if the choice of an arm is at that edge.

        Returns whether the grid has grown. All trials must have ended.
        """
        if len(self.grid) < 2 or len(self.grid) >= self.max_size:
            return False
        chosen = [lr for arm in self.arms if (lr := best_lr(self._losses(arm))) is not None]
        low, high = self.grid[0] in chosen, self.grid[-1] in chosen
        if low:
            self.grid.insert(0, _rounded(self.grid[0] ** 2 / self.grid[1]))
        if high:
            self.grid.append(_rounded(self.grid[-1] ** 2 / self.grid[-2]))
        if low or high:
            self.say(
                f"{self.name}: the best learning rate is at the edge, so the grid of all arms grows to "
                f"{_listed(self.grid)}"
            )
        return low or high

    def choose(self, arm: ArmPlan) -> Choice:
        """Return the choice for one arm; raise OelmError if trials have not ended, or all have diverged."""
        losses = self._losses(arm)
        if (lr := best_lr(losses)) is None:
            raise OelmError(
                f"{arm.id}: no learning rate of the grid {_listed(self.grid)} gave a finite validation loss; "
                "try smaller learning rates with --grid"
            )
        sd = trial_sd(self._losses(other) for other in self.arms)
        if sd is None:
            return Choice(arm.id, lr, losses)
        again = choice_probabilities(losses, sd)
        means = {tried: fmean(values) for tried, values in compared(losses).items()}
        return Choice(arm.id, lr, losses, again[lr], choice_sd(again, means))

    def with_lr(self, arm: ArmPlan, lr: float) -> ArmPlan:
        """Return the arm with its chosen learning rate in the config of every run."""
        tune = TuneConfig(grid=tuple(self.grid), seeds=arm.trial_seeds)
        runs = (replace(run, optim=replace(run.optim, lr=lr), tune=tune) for run in arm.runs)
        return replace(arm, runs=tuple(runs))

    def runs_if_tuned(self) -> list[RunConfig]:
        """Return the runs of all arms with their chosen learning rates.

        If the best learning rate is at an edge, the grid grows. If trials have not all ended, return the runs
        that exist already, with the learning rate and grid of their folders if tuning can still choose them.
        """
        try:
            while self.grow():
                pass
            return [run for arm in self.arms for run in self.with_lr(arm, self.choose(arm).lr).runs]
        except OelmError:
            return [run for arm in self.arms for run in self._existing_runs(arm)]

    def conclude(self, tuned: Tuned) -> None:
        """Choose the learning rate of every arm, and add the arms to `tuned`."""
        for arm in self.arms:
            try:
                choice = self.choose(arm)
            except OelmError as error:
                tuned.problems.append(str(error))
                self.say(str(error))
                continue
            self.say(f"tuned {choice}")
            tuned.choices.append(choice)
            tuned.arms.append(self.with_lr(arm, choice.lr))

    def drop(self, stuck: Sequence[Job]) -> bool:
        """Return whether one of the `stuck` jobs is a trial of this group; if so, tell the user.

        The reason of a failed trial is not told here: the commands print it when it fails, and at their end.
        """
        own = {(arm.id, arm.scale) for arm in self.arms}
        found = any((job.config.id, job.config.scale) in own for job in stuck)
        if found:
            self.say(f"{self.name}: not all tuning trials have ended; run the same command again to continue")
        return found

    def _existing_runs(self, arm: ArmPlan) -> Iterator[RunConfig]:
        for run in arm.runs:
            with contextlib.suppress(OelmError, OSError):  # there is no run, or it is damaged
                held = RunFolder(run_path(self.root, run)).config()
                fits = may_choose(held.tune, self.grid, arm.trial_seeds)
                tune = held.tune if fits else TuneConfig(grid=tuple(self.grid), seeds=arm.trial_seeds)
                yield replace(run, optim=replace(run.optim, lr=held.optim.lr), tune=tune)

    def _trials_of(self, arm: ArmPlan) -> list[RunConfig]:
        """Return the trials with the first seed and, once these have ended, the trials of the better half."""
        trials = trial_configs(arm, self.grid)
        first = [t for t in trials if t.seed == arm.trial_seeds[0]]
        if not all(RunFolder(run_path(self.root, t)).ended() for t in first):
            return first
        loss = {t.optim.lr: validation_loss(run_path(self.root, t)) for t in first}
        kept = sorted(self.grid, key=lambda lr: (loss[lr], lr))[: finalists(len(self.grid))]
        return [*first, *(t for t in trials if t.optim.lr in kept and t not in first)]

    def _losses(self, arm: ArmPlan) -> dict[float, list[float]]:
        """Return the losses of the trials of an arm; raise OelmError if one has not ended."""
        losses: dict[float, list[float]] = {lr: [] for lr in self.grid}
        for trial in self._trials_of(arm):
            losses[trial.optim.lr].append(validation_loss(run_path(self.root, trial)))
        return losses

    def _recorded_grid(self, asked: Sequence[float]) -> list[float]:
        """Return the grid of the runs of this comparison that exist below the runs folder; [] if none do.

        A grid that lacks a learning rate in `asked`, or was tried with other trial seeds, is ignored. If the
        runs have different grids, [] is returned.
        """
        own: set[tuple[float, ...]] = set()
        others: set[tuple[float, ...]] = set()
        for study in {arm.runs[0].study for arm in self.arms}:
            for place in Path(self.root, study).glob(f"*/scale={self.arms[0].scale}"):
                tune = _tuning_of_runs(place, self.name)
                if tune and may_choose(tune, asked, self.arms[0].trial_seeds):
                    (own if place.parent.name in {arm.id for arm in self.arms} else others).add(tune.grid)
        return next((sorted(*grids) for grids in (own, others) if len(grids) == 1), [])


def best_lr(losses: Mapping[float, Sequence[float]]) -> float | None:
    """Return the learning rate with the lowest mean loss of those tried with all seeds; None if all diverged.

    >>> best_lr({1e-3: [2.0], 2e-3: [3.0, 3.0], 4e-3: [2.5, 3.0], 8e-3: [2.0, float("inf")]})
    0.004
    """
    return min(found, key=lambda lr: fmean(found[lr])) if (found := compared(losses)) else None


def trial_configs(arm: ArmPlan, grid: Sequence[float]) -> list[RunConfig]:
    """Return the configs of all tuning trials of an arm: one trial per learning rate and trial seed."""
    config, share = arm.runs[0], arm.experiment.trial_share
    steps, epochs = (
        amount and max(1, round(amount * share)) for amount in (config.budget.steps, config.budget.epochs)
    )
    return [
        replace(
            config,
            seed=seed,
            optim=replace(config.optim, lr=lr),
            budget=replace(config.budget, steps=steps, epochs=epochs),
            tune=TuneConfig(trial=True, grid=tuple(grid), seeds=arm.trial_seeds),
        )
        for lr in grid
        for seed in arm.trial_seeds
    ]


def validation_loss(path: Path) -> float:
    """Return the best validation loss of the tuning trial in this folder, or infinity if it diverged.

    Raises OelmError if the trial has not ended.
    """
    folder = RunFolder(path)
    results, status = folder.finished_results(), folder.status()
    if results is not None:
        return results.validation.loss if results.validation else math.inf
    if status is not None and status.state == "diverged":
        return math.inf
    state = status.state if status else "not started"
    raise OelmError(
        f"the tuning trial {path} is {state}, but all trials must end before a learning rate is chosen; "
        "run the same command again"
    )


def _tuning_of_runs(place: Path, group: str) -> TuneConfig | None:
    """Return how the runs in the folder of an arm were tuned; None if it has no runs in this comparison."""
    for file in sorted(place.glob("seed=*/config.yaml")):
        try:
            config = RunFolder(file.parent).config()
        except (OelmError, OSError):
            continue
        return config.tune if config.compare.group == group and config.tune.grid else None
    return None


def _listed(grid: Sequence[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in grid)


def _rounded(lr: float) -> float:
    return float(f"{lr:.3g}")
