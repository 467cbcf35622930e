"""Turn what the user asks for (experiments, scales, seeds, changed settings) into the arms of a study.

An arm is one experiment (a method on a dataset) at one scale, with a run for each seed.

arms = Request(select(study="gap"), scales=("mini",), seeds=(0, 1, 2)).arms()
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oelm.config.limits import check_config
from oelm.config.run_config import ArmKey, RunConfig, Scale
from oelm.errors import UsageError
from oelm.experiments.experiment import Experiment, require_folder_name

TRIAL_SEEDS = (1000, 1001)  # seeds of tuning trials, far above the seeds of other runs, which start at 0


def finalists(values: int) -> int:
    """Return how many of the `values` learning rates of a grid are tried with all trial seeds (half)."""
    return min(values, max(2, math.ceil(values / 2)))


@dataclass(frozen=True)
class ArmPlan:
    """The plan of one arm: one experiment at one scale, with a config per seed."""

    experiment: Experiment
    runs: tuple[RunConfig, ...]
    # Learning rates that tuning tries first; () = the learning rate is not tuned.
    grid: tuple[float, ...] = ()
    trial_seeds: tuple[int, ...] = ()  # seeds of the tuning trials

    @property
    def id(self) -> str:
        return self.experiment.id

    @property
    def key(self) -> ArmKey:
        return self.runs[0].arm_key

    @property
    def scale(self) -> Scale:
        return self.runs[0].scale

    @property
    def total_runs(self) -> int:
        """The number of runs and tuning trials, if the grid of learning rates does not grow."""
        return len(self.runs) + self.total_trials

    @property
    def total_trials(self) -> int:
        """The number of tuning trials, if the grid of learning rates does not grow."""
        return len(self.grid) + finalists(len(self.grid)) * max(0, len(self.trial_seeds) - 1)


@dataclass(frozen=True)
class Request:
    """What the user wants to run: experiments, scales, seeds and changed settings."""

    experiments: Sequence[Experiment]
    scales: Sequence[Scale] = ("full",)
    seeds: Sequence[int] = ()  # () = each experiment's own seeds
    changes: Mapping[str, Any] = field(default_factory=dict)  # config field ("budget.steps") -> value
    study: str = ""  # name of the study folder; "" = the name of each experiment's study
    tune: bool | None = None  # whether to tune the learning rate; None = as the catalogue says
    grid: Sequence[float] = ()  # learning rates that tuning tries; () = each experiment's own grid
    trial_seeds: Sequence[int] = TRIAL_SEEDS
    data_dir: str = ""

    def __post_init__(self) -> None:
        if self.study:
            require_folder_name(self.study, "a study's name (--as)")
        if self.data_dir and set(self.scales) == {"smoke"} and not self.changes:
            raise UsageError(
                "--data-dir has no effect at smoke scale, which uses only built-in text; leave it out"
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
        grid = tuple(sorted({*(self.grid or e.grid(scale))}))
        if not all(0 < lr < math.inf for lr in grid):
            raise UsageError(
                f"the learning rates of the grid (--grid) must be finite and above 0, not {list(grid)}"
            )
        seeds = tuple(dict.fromkeys(self.trial_seeds))
        if len(seeds) < 2:
            raise UsageError(
                f"too few trial seeds: tuning needs at least two, such as --trial-seeds {TRIAL_SEEDS[0]} "
                f"{TRIAL_SEEDS[1]}"
            )
        return ArmPlan(e, runs, grid, seeds)

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
        """Return the name of the study folder: the study of the experiment, perhaps with a suffix.

        The suffix says that the user tunes an experiment that the catalogue does not tune, or the other way
        round. It keeps these runs apart from the runs that the catalogue describes.
        """
        if self._tunes(e) == e.tuned:
            return e.study
        return f"{e.study}-{'tuned' if self.tune else 'untuned'}"
