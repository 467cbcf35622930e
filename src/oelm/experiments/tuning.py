"""Learning-rate tuning: all arms of a comparison try the same grid, and each gets the best value for it.

The best learning rate is the one with the lowest validation loss. The loss is used rather than the accuracy,
because on a few hundred validation examples accuracy differences are mostly noise. A trial is a run that is
used only to choose the learning rate; it never uses the test split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oelm.config.run_config import RunConfig, TuneConfig
from oelm.errors import OelmError, UsageError
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path

TRIAL_SEEDS = (0, 1)


@dataclass(frozen=True)
class Choice:
    """The learning rate chosen for one experiment, and the validation losses it was chosen by."""

    id: str
    lr: float
    losses: dict[float, float]  # lr -> best validation loss, averaged over seeds; inf if a trial diverged
    seed_spread: float = 0.0  # largest difference in loss between the seeds of the chosen learning rate

    @property
    def at_edge(self) -> bool:
        """Whether the chosen learning rate is the smallest or largest of a grid of more than two."""
        return len(self.losses) > 2 and self.lr in (min(self.losses), max(self.losses))

    @property
    def lead(self) -> float:
        """Loss of the second-best learning rate minus loss of the best; infinite if only one was tried."""
        best, *others = sorted(self.losses.values())
        return others[0] - best if others else math.inf

    def __str__(self) -> str:
        tried = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in self.losses.items())
        edge = " (at the edge of the grid, so a better one may lie outside)" if self.at_edge else ""
        spread = f"; its seeds differ by {self.seed_spread:.4f}" if self.seed_spread else ""
        if self.lead < self.seed_spread:
            spread += ", more than it leads by, so the choice is uncertain"
        return f"{self.id}: learning rate {self.lr:g}; validation losses {tried}{spread}{edge}"


def trial_configs(
    config: RunConfig, grid: Sequence[float], seeds: Sequence[int] = TRIAL_SEEDS, share: float = 1.0
) -> list[RunConfig]:
    """Return the configs of the tuning trials of a run: one trial per learning rate and seed.

    share: length of a trial as a fraction of the run's steps or epochs
    """
    if not grid or any(lr <= 0 for lr in grid):
        raise UsageError(f"the learning rates of the grid (--grid) must be above 0, not {list(grid)}")
    if not seeds:
        raise UsageError("no seeds for tuning trials: give at least one with --trial-seeds")
    steps, epochs = (
        amount and max(1, round(amount * share)) for amount in (config.budget.steps, config.budget.epochs)
    )
    return [
        replace(
            config,
            seed=seed,
            optim=replace(config.optim, lr=lr),
            budget=replace(config.budget, steps=steps, epochs=epochs),
            tune=TuneConfig(trial=True, grid=tuple(grid), seeds=tuple(seeds)),
        )
        for lr in grid
        for seed in seeds
    ]


def choose_lr(trials: Sequence[RunConfig], root: Path | str) -> Choice:
    """Return the choice of the learning rate with the lowest mean validation loss among these trials.

    Raises OelmError if a trial has not ended, or if no learning rate gave a finite loss.
    """
    losses: dict[float, list[float]] = {}
    for trial in trials:
        losses.setdefault(trial.optim.lr, []).append(validation_loss(RunFolder(run_path(root, trial))))
    means = {lr: sum(values) / len(values) for lr, values in losses.items()}
    best = min(means, key=lambda lr: means[lr])
    if math.isinf(means[best]):
        raise OelmError(
            f"{trials[0].id}: no learning rate of the grid {list(means)} gave a finite validation loss; "
            "try smaller learning rates with --grid"
        )
    return Choice(trials[0].id, best, means, max(losses[best]) - min(losses[best]))


def with_chosen_lr(config: RunConfig, choice: Choice, trials: Sequence[RunConfig]) -> RunConfig:
    """Return `config` with the chosen learning rate, and with the grid of learning rates that was tried."""
    return replace(
        config,
        optim=replace(config.optim, lr=choice.lr),
        tune=replace(trials[0].tune, trial=False),
    )


def validation_loss(folder: RunFolder) -> float:
    """Return the best validation loss of a tuning trial, or infinity if the trial diverged.

    Raises OelmError if the trial has not ended.
    """
    results, status = folder.finished_results(), folder.status()
    if results is not None:
        return results.validation.loss if results.validation else math.inf
    if status is not None and status.state == "diverged":
        return math.inf
    state = status.state if status else "not started"
    raise OelmError(
        f"the tuning trial {folder.path} is {state}; all trials must end before a learning rate is chosen"
    )
