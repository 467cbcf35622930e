"""Tuning by successive halving, with a launcher that writes finished trials."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fake_run import write_finished_run
from oelm.config.hash import config_hash
from oelm.errors import UsageError
from oelm.experiments.catalogue import experiment
from oelm.experiments.decide.tune import count_trials, tune_by_halving
from oelm.experiments.study import Request
from oelm.runs.folder import RunFolder
from oelm.runs.schema import Status

GRID = (1e-3, 2e-3, 4e-3, 8e-3)
BASELINE, FROZEN = experiment("TS-BASELINE-TUNED"), experiment("TS-FREEZE-TUNED")


class TrialWriter:
    """Writes trials whose loss grows with the distance to the best learning rate; 0.05 and above diverges."""

    def __init__(self, best: dict[str, float]) -> None:
        self.best, self.trials = best, []

    def launch(self, jobs):
        for job in jobs:
            lr = job.config.optim.lr
            self.trials.append((job.config.id, lr, job.config.seed))
            if lr >= 0.05:
                RunFolder(job.folder).write_status(Status(state="diverged"))
                job.state = "diverged"
                continue
            loss = 2 + abs(math.log(lr / self.best[job.config.id])) + 1e-4 * (job.config.seed - 1000)
            write_finished_run(job.folder, job.config, loss)
            job.state = "finished"
        return jobs


def arms(*experiments, grid=GRID, seeds=(1000, 1001)):
    return Request(experiments, ("smoke",), grid=grid, trial_seeds=seeds).arms()


def test_the_better_half_gets_the_second_seed(tmp_path: Path):
    writer = TrialWriter({FROZEN.id: 2.1e-3})
    planned = arms(FROZEN)
    tuned = tune_by_halving(planned, tmp_path, writer, lambda _: None)
    assert tuned.choices[0].lr == 2e-3
    assert tuned.choices[0].seed_spread == pytest.approx(1e-4)
    assert sorted(lr for _, lr, seed in writer.trials if seed == 1001) == [2e-3, 4e-3]
    # Six trials of half the length: less than one seed of the whole grid in full length.
    assert len(writer.trials) == count_trials(planned[0]) == 6
    (run,) = tuned.arms[0].runs
    assert (run.optim.lr, run.tune.grid, run.tune.trial) == (2e-3, GRID, False)
    again = TrialWriter({})
    assert tune_by_halving(planned, tmp_path, again, lambda _: None).choices == tuned.choices
    assert again.trials == []


def test_a_best_value_at_the_edge_extends_the_grid_of_all_arms_and_keeps_trials(tmp_path: Path):
    writer, said = TrialWriter({BASELINE.id: 4e-3, FROZEN.id: 17e-3}), []
    tuned = tune_by_halving(arms(BASELINE, FROZEN), tmp_path, writer, said.append)
    assert {c.id: c.lr for c in tuned.choices} == {BASELINE.id: 4e-3, FROZEN.id: 16e-3}
    grids = {arm.runs[0].tune.grid for arm in tuned.arms}
    assert grids == {(*GRID, 16e-3, 32e-3)}
    assert len(writer.trials) == len(set(writer.trials))  # no trial ran twice
    assert any("the grid of all arms grows to 0.001, 0.002, 0.004, 0.008, 0.016" in line for line in said)


def test_a_grid_does_not_grow_without_end(tmp_path: Path):
    tuned = tune_by_halving(arms(FROZEN), tmp_path, TrialWriter({FROZEN.id: 1e-9}), lambda _: None)
    assert len(tuned.arms[0].runs[0].tune.grid) == len(GRID) + 3
    assert tuned.choices[0].at_edge


def test_a_diverged_learning_rate_loses(tmp_path: Path):
    planned = arms(FROZEN, grid=(1e-2, 3e-2, 9e-2))
    tuned = tune_by_halving(planned, tmp_path, TrialWriter({FROZEN.id: 9e-2}), lambda _: None)
    assert tuned.choices[0].lr == 3e-2


def test_the_hash_of_a_trial_does_not_depend_on_its_grid():
    small, large = (arms(FROZEN, grid=grid)[0] for grid in (GRID[:2], GRID))
    assert config_hash(small.trials[0]) == config_hash(large.trials[0])
    assert config_hash(small.trials[0]) != config_hash(large.trials[-1])


def test_one_trial_seed_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="too few trial seeds"):
        tune_by_halving(arms(FROZEN, seeds=(1000,)), tmp_path, TrialWriter({}), lambda _: None)
