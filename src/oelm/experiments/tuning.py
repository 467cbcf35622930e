"""The same grid of learning rates for every arm, judged by validation loss over trial seeds; then the runs.

A trial never sees the test split. Its loss, not its accuracy, decides: on a few hundred validation
examples accuracy picks rates by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oelm.config.run_config import RunConfig, TuneConfig
from oelm.errors import OelmError, UsageError
from oelm.runs.folder import RunFolder, run_path

TRIAL_SEEDS = (0, 1)


@dataclass(frozen=True)
class Choice:
    """The rate chosen for one experiment and what it was chosen from."""

    id: str
    rate: float
    losses: dict[float, float]  # rate -> mean of the best validation losses over seeds; inf when one diverged

    @property
    def at_edge(self) -> bool:
        """The best rate is the grid's smallest or largest: a better one may lie outside."""
        return len(self.losses) > 2 and self.rate in (min(self.losses), max(self.losses))

    def __str__(self) -> str:
        tried = ", ".join(f"{r:g}: {loss:.4f}" for r, loss in self.losses.items())
        edge = " (at the edge of the grid: a better one may lie outside)" if self.at_edge else ""
        return f"{self.id}: rate {self.rate:g} of {tried}{edge}"


def trial_configs(
    config: RunConfig, grid: Sequence[float], seeds: Sequence[int] = TRIAL_SEEDS, share: float = 1.0
) -> list[RunConfig]:
    """Every point of the grid for one experiment, on `share` of its steps or epochs."""
    if not grid or any(rate <= 0 for rate in grid):
        raise UsageError(f"a grid of learning rates needs numbers above 0, not {list(grid)}")
    if not seeds:
        raise UsageError("tuning needs at least one seed")
    steps, epochs = (
        amount and max(1, round(amount * share)) for amount in (config.budget.steps, config.budget.epochs)
    )
    return [
        replace(
            config,
            seed=seed,
            optim=replace(config.optim, lr=rate),
            budget=replace(config.budget, steps=steps, epochs=epochs),
            tune=TuneConfig(trial=True, grid=tuple(grid), seeds=tuple(seeds)),
        )
        for rate in grid
        for seed in seeds
    ]


def choose(trials: Sequence[RunConfig], root: Path | str) -> Choice:
    """The rate with the lowest mean validation loss. Every trial must have ended."""
    losses: dict[float, list[float]] = {}
    for trial in trials:
        losses.setdefault(trial.optim.lr, []).append(_loss(RunFolder(run_path(root, trial))))
    means = {rate: sum(values) / len(values) for rate, values in losses.items()}
    best = min(means, key=lambda rate: means[rate])
    if math.isinf(means[best]):
        raise OelmError(f"{trials[0].id}: no rate of the grid {list(means)} gave a finite loss")
    return Choice(trials[0].id, best, means)


def tuned(config: RunConfig, choice: Choice, trials: Sequence[RunConfig]) -> RunConfig:
    """The run proper with the chosen rate, and the grid it was chosen from on record."""
    return replace(
        config,
        optim=replace(config.optim, lr=choice.rate),
        tune=replace(trials[0].tune, trial=False),
    )


def _loss(folder: RunFolder) -> float:
    results, status = folder.finished_results(), folder.status()
    if results is not None:
        return float(results["validation"]["loss"])
    if status is not None and status.state == "diverged":
        return math.inf
    state = status.state if status else "not started"
    raise OelmError(f"the trial {folder.path} is {state}; a rate can only be chosen when all have ended")
