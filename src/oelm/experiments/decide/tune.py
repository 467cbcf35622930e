"""Tune learning rates by successive halving, with a grid that grows if the best value is at its edge.

1. Every learning rate of the grid is tried with the first trial seed, for half the steps of a trial of
   `oelm run`.
2. The better half of the learning rates (at least two) is tried with the other trial seeds.
3. The learning rate with the lowest mean validation loss is chosen. If it is the smallest or largest of the
   grid for any arm of a comparison, the grid grows on that side for all arms of the comparison. Finished
   trials are kept.

With two seeds and a grid of G values, this costs as much as 0.75 G trials of `oelm run`. The trials that are
still needed are computed from the finished ones, so a restarted command continues where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oelm.config.run_config import RunConfig
from oelm.errors import UsageError
from oelm.experiments.launch.jobs import Job, Launcher, make_jobs
from oelm.experiments.study import ArmPlan, Say
from oelm.experiments.tuning import Choice, choose_lr, trial_configs, validation_loss, with_chosen_lr
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.states import is_terminal

TRIAL_SEEDS = (1000, 1001)  # far above the seeds of other runs, which start at 0
LENGTH = 0.5  # steps of a tuning trial here / steps of a tuning trial of `oelm run`
MAX_EXTENSIONS = 3  # maximum number of learning rates that are added to a grid


@dataclass
class Tuned:
    """How tuning ended: the arms with their chosen learning rates, or why tuning stopped before that."""

    arms: list[ArmPlan]
    choices: list[Choice]
    stopped: str = ""  # "" if all arms are tuned; "interrupted" or "failed"


def tune_by_halving(arms: Sequence[ArmPlan], root: Path | str, launcher: Launcher, say: Say = print) -> Tuned:
    """Run tuning trials until every arm that is to be tuned has a learning rate.

    Arms without tuning trials are returned unchanged.
    """
    groups: dict[tuple[str, str], list[ArmPlan]] = {}
    for arm in arms:
        if arm.trials:
            groups.setdefault((arm.runs[0].compare.group, arm.scale), []).append(arm)
    grids = {key: sorted({t.optim.lr for arm in group for t in arm.trials}) for key, group in groups.items()}
    most = {key: len(grid) + MAX_EXTENSIONS for key, grid in grids.items()}
    while True:
        wanted = [t for key, group in groups.items() for arm in group for t in _trials(arm, grids[key], root)]
        missing = [t for t in wanted if not _ended(t, root)]
        if missing:
            jobs = list(launcher.launch(make_jobs(missing, root)))
            if any(not is_terminal(job.state) for job in jobs):
                return Tuned([], [], _why_stopped(jobs, say))
            continue
        chosen: dict[tuple[str, str], Choice] = {
            (arm.id, arm.scale): choose_lr(_finalists(arm, grids[key], root), root)
            for key, group in groups.items()
            for arm in group
        }
        grown = [
            key
            for key, group in groups.items()
            if len(grids[key]) < most[key] and _grow(grids[key], [chosen[arm.id, arm.scale] for arm in group])
        ]
        for key in grown:
            tried = ", ".join(f"{lr:g}" for lr in grids[key])
            say(f"{key[0]}: the best learning rate is at the edge, so the grid of all arms grows to {tried}")
        if not grown:
            break
    for choice in chosen.values():
        say(f"tuned {choice}")
    return Tuned([_with_lr(arm, grids, chosen) for arm in arms], list(chosen.values()))


def count_trials(arm: ArmPlan) -> int:
    """Return how many trials the arm needs if its grid does not grow."""
    values, seeds = len({t.optim.lr for t in arm.trials}), len({t.seed for t in arm.trials})
    return values + _kept(values) * (seeds - 1)


def _kept(values: int) -> int:
    """Return how many learning rates are tried with more than one seed; `values` is the size of the grid."""
    return min(values, max(2, math.ceil(values / 2)))


def _configs(arm: ArmPlan, grid: Sequence[float]) -> list[RunConfig]:
    seeds = tuple(dict.fromkeys(t.seed for t in arm.trials))
    if len(seeds) < 2:
        raise UsageError(
            "too few trial seeds: tuning by `oelm decide` needs at least two, such as --trial-seeds 1000 1001"
        )
    return trial_configs(arm.runs[0], grid, seeds, arm.experiment.trial_share * LENGTH)


def _trials(arm: ArmPlan, grid: Sequence[float], root: Path | str) -> list[RunConfig]:
    """Return the trials that are needed, as far as this is known now.

    These are the trials with the first seed. When they have ended, the trials with the other seeds of the
    better half of the learning rates are added.
    """
    first = [t for t in _configs(arm, grid) if t.seed == arm.trials[0].seed]
    return first if not all(_ended(t, root) for t in first) else [*first, *_finalists(arm, grid, root)]


def _finalists(arm: ArmPlan, grid: Sequence[float], root: Path | str) -> list[RunConfig]:
    """Return all trials of the learning rates that were in the better half with the first seed."""
    trials, seed = _configs(arm, grid), arm.trials[0].seed
    first = {t.optim.lr: validation_loss(RunFolder(run_path(root, t))) for t in trials if t.seed == seed}
    kept = sorted(grid, key=lambda lr: (first[lr], lr))[: _kept(len(grid))]
    return [t for t in trials if t.optim.lr in kept]


def _grow(grid: list[float], choices: Sequence[Choice]) -> bool:
    """Extend the grid at each end that is the chosen learning rate of an arm; return whether it has grown."""
    if len(grid) < 2:
        return False
    low, high = ([c.lr for c in choices].count(edge) for edge in (grid[0], grid[-1]))
    if low:
        grid.insert(0, _rounded(grid[0] ** 2 / grid[1]))
    if high:
        grid.append(_rounded(grid[-1] ** 2 / grid[-2]))
    return bool(low or high)


def _rounded(lr: float) -> float:
    return float(f"{lr:.3g}")


def _ended(trial: RunConfig, root: Path | str) -> bool:
    return RunFolder(run_path(root, trial)).ended() is not None


def _with_lr(
    arm: ArmPlan, grids: dict[tuple[str, str], list[float]], chosen: dict[tuple[str, str], Choice]
) -> ArmPlan:
    if not arm.trials:
        return arm
    trials = _configs(arm, grids[arm.runs[0].compare.group, arm.scale])
    runs = tuple(with_chosen_lr(config, chosen[arm.id, arm.scale], trials) for config in arm.runs)
    return replace(arm, runs=runs)


def _why_stopped(jobs: Sequence[Job], say: Say) -> str:
    failed = [job for job in jobs if job.state == "failed"]
    for job in failed:
        say(f"failed: {job.name}: {job.reason}")
    if not failed:
        say("not all tuning trials have ended; run the same command again to continue")
    return "failed" if failed else "interrupted"
