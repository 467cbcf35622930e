from __future__ import annotations

import math
from pathlib import Path

import pytest

from fake_run import write_finished_run
from oelm.config.overrides import override
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError
from oelm.experiments.catalogue import experiment
from oelm.experiments.study import Request
from oelm.experiments.tuning import choose_lr, trial_configs, with_chosen_lr
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.schema import Status

CONFIG = experiment("GPT-02").at("smoke", 5)


def trials_with(root: Path, losses: dict[float, list[float]]) -> list[RunConfig]:
    """Ended trials with the given validation losses, one per seed; inf means diverged."""
    seeds = range(len(next(iter(losses.values()))))
    trials = trial_configs(CONFIG, tuple(losses), tuple(seeds))
    for trial in trials:
        loss = losses[trial.optim.lr][trial.seed]
        folder = RunFolder(run_path(root, trial))
        folder.claim(trial)
        if math.isinf(loss):
            folder.write_status(Status(state="diverged"))
        else:
            write_finished_run(folder.path, trial, loss)
    return trials


def test_the_mean_over_seeds_decides(tmp_path: Path) -> None:
    trials = trials_with(tmp_path, {1e-3: [2.0, 4.0], 2e-3: [2.8, 2.9], 4e-3: [3.5, 3.5]})
    choice = choose_lr(trials, tmp_path)
    assert choice.lr == 2e-3
    assert not choice.at_edge
    final = with_chosen_lr(CONFIG, choice, trials)
    assert (final.optim.lr, final.tune.trial, final.seed) == (2e-3, False, 5)
    assert (final.tune.grid, final.tune.seeds) == ((1e-3, 2e-3, 4e-3), (0, 1))


def test_a_learning_rate_that_diverges_once_loses_and_an_edge_is_reported(tmp_path: Path) -> None:
    choice = choose_lr(
        trials_with(tmp_path, {1e-3: [3.0, 3.0], 2e-3: [2.0, math.inf], 4e-3: [4.0, 4.0]}), tmp_path
    )
    assert choice.lr == 1e-3
    assert choice.at_edge
    assert "edge of the grid" in str(choice)


def test_it_is_an_error_if_all_trials_diverge(tmp_path: Path) -> None:
    with pytest.raises(OelmError, match="finite validation loss"):
        choose_lr(trials_with(tmp_path, {1e-3: [math.inf], 2e-3: [math.inf]}), tmp_path)


def test_a_choice_needs_all_trials(tmp_path: Path) -> None:
    trials = trials_with(tmp_path, {1e-3: [3.0], 2e-3: [2.0]})
    RunFolder(run_path(tmp_path, trials[1])).status_file.unlink()
    with pytest.raises(OelmError, match="not started"):
        choose_lr(trials, tmp_path)


def test_a_grid_needs_learning_rates_and_seeds() -> None:
    config = override(CONFIG, {"budget.steps": 100})
    for grid, seeds in (((), (0,)), ((0.0,), (0,)), ((1e-3,), ())):
        with pytest.raises(UsageError):
            trial_configs(config, grid, seeds)


def test_tuned_and_untuned_runs_of_one_experiment_never_share_a_folder(tmp_path: Path) -> None:
    plain, catalogued = experiment("GPT-02"), experiment("TS-FREEZE-TUNED")
    places = {
        (e.id, tune): run_path(tmp_path, Request([e], ("smoke",), tune=tune).arms()[0].runs[0])
        for e in (plain, catalogued)
        for tune in (None, True, False)
    }
    assert places["GPT-02", None] == places["GPT-02", False] != places["GPT-02", True]
    assert (
        places["TS-FREEZE-TUNED", None] == places["TS-FREEZE-TUNED", True] != places["TS-FREEZE-TUNED", False]
    )


def test_a_trial_has_its_share_of_steps_or_epochs_and_at_least_one() -> None:
    by_steps, by_epochs = experiment("GAP-TS-baseline").at("mini"), experiment("FT-SST2-baseline").at("mini")
    assert trial_configs(by_steps, (1e-3,), (0,), 0.5)[0].budget.steps == by_steps.budget.steps // 2
    assert trial_configs(by_steps, (1e-3,), (0,), 1e-9)[0].budget.steps == 1
    assert trial_configs(by_epochs, (1e-3,), (0,), 0.5)[0].budget.epochs == 1
    assert trial_configs(by_epochs, (1e-3,), (0,), 0.1)[0].budget.epochs == 1
    assert trial_configs(by_epochs, (1e-3,), (0,), 0.5)[0].budget.steps == 0
