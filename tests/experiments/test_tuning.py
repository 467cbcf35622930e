"""Tuning by successive halving, with a launcher that writes ended trials."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fake_run import write_finished_run
from oelm.analysis.statistics.lr_choice import choice_probabilities, choice_sd, trial_sd
from oelm.cli.main import main
from oelm.config.hash import config_hash
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import Events, Job, make_jobs, skip_if_ended
from oelm.experiments.request import Request
from oelm.experiments.tuning import TuningGroup, trial_configs, tune
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.schema import Status

GRID = (1e-3, 2e-3, 4e-3, 8e-3)
BASELINE, FROZEN = experiment("TS-BASELINE-TUNED"), experiment("TS-FREEZE-TUNED")


class TrialWriter:
    """Writes trials whose loss grows with the distance to the best learning rate; 0.05 and above diverges."""

    def __init__(self, root: Path, best: dict[str, float], noise: float = 0.0) -> None:
        self.root, self.best, self.noise, self.trials = root, best, noise, []

    def __call__(self, configs: Sequence[RunConfig]) -> list[Job]:
        jobs = make_jobs(configs, self.root)
        for job in jobs:
            if not skip_if_ended(job, Events()):
                self.write(job)
        return jobs

    def write(self, job: Job) -> None:
        lr = job.config.optim.lr
        self.trials.append((job.config.id, lr, job.config.seed))
        if lr >= 0.05:
            RunFolder(job.folder).write_status(Status(state="diverged"))
            job.state = "diverged"
            return
        loss = 2 + abs(math.log(lr / self.best[job.config.id])) + 1e-4 * (job.config.seed - 1000)
        loss += self.noise * (1 if lr > 2e-3 else -1) * (1 if job.config.seed % 2 else -1)
        write_finished_run(job.folder, job.config, loss)
        job.state = "finished"


def arms(*experiments, grid=GRID, seeds=(1000, 1001), **options):
    return Request(experiments, ("smoke",), grid=grid, trial_seeds=seeds, **options).arms()


def quiet(_: str) -> None:
    pass


def test_the_better_half_gets_the_second_seed(tmp_path: Path) -> None:
    writer = TrialWriter(tmp_path, {FROZEN.id: 2.1e-3})
    planned = arms(FROZEN)
    tuned = tune(planned, tmp_path, writer, say=quiet)
    assert tuned.choices[0].lr == 2e-3
    assert sorted(lr for _, lr, seed in writer.trials if seed == 1001) == [2e-3, 4e-3]
    assert len(writer.trials) == planned[0].total_trials == 6
    # Six trials of half the length of a run cost less than one run for each of the four learning rates.
    assert trial_configs(planned[0], GRID)[0].budget.steps == planned[0].runs[0].budget.steps // 2
    (run,) = tuned.arms[0].runs
    assert (run.optim.lr, run.tune.grid, run.tune.seeds) == (2e-3, GRID, (1000, 1001))
    assert not run.tune.trial
    again = TrialWriter(tmp_path, {})
    assert tune(planned, tmp_path, again, say=quiet).choices == tuned.choices
    assert again.trials == []


def test_a_best_value_at_the_edge_extends_the_grid_of_all_arms_and_keeps_trials(tmp_path: Path) -> None:
    writer, said = TrialWriter(tmp_path, {BASELINE.id: 4e-3, FROZEN.id: 17e-3}), []
    tuned = tune(arms(BASELINE, FROZEN), tmp_path, writer, say=said.append)
    assert {c.id: c.lr for c in tuned.choices} == {BASELINE.id: 4e-3, FROZEN.id: 16e-3}
    grids = {arm.runs[0].tune.grid for arm in tuned.arms}
    assert grids == {(*GRID, 16e-3, 32e-3)}
    assert len(writer.trials) == len(set(writer.trials))  # no trial ran twice
    assert any("the grid of all arms grows to 0.001, 0.002, 0.004, 0.008, 0.016" in line for line in said)


@pytest.mark.parametrize("lr", [0.0, math.inf, math.nan])
def test_a_grid_of_impossible_learning_rates_is_refused(lr: float) -> None:
    with pytest.raises(UsageError, match="must be finite and above 0"):
        arms(BASELINE, grid=(1e-3, lr))


def test_a_dry_run_refuses_runs_with_another_learning_rate_than_the_tuned_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", FROZEN.id, "--scale", "smoke", "--grid", *map(str, GRID), "--trial-seeds", "1000", "1001"]
    words += ["--runs", str(tmp_path), "--dry-run"]
    (arm,) = tune(arms(FROZEN), tmp_path, TrialWriter(tmp_path, {FROZEN.id: 17e-3}), say=quiet).arms
    (run,) = arm.runs
    assert main(words) == 0
    assert "lr 0.032" in capsys.readouterr().out  # the grid has grown
    make_jobs([replace(run, optim=replace(run.optim, lr=1e-3))], tmp_path)
    assert main(words) == 2
    assert "optim.lr: 0.001 -> 0.016" in capsys.readouterr().err


@pytest.mark.parametrize("change", [("--set", "data.max_length=16"), ("--grid", "3e-3", "5e-3")])
@pytest.mark.parametrize("dry_run", [("--dry-run",), ()])
def test_runs_with_other_settings_are_refused_before_a_trial_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, ...], dry_run: tuple[str, ...]
) -> None:
    (arm,) = tune(arms(FROZEN), tmp_path, TrialWriter(tmp_path, {FROZEN.id: 2.1e-3}), say=quiet).arms
    make_jobs(arm.runs, tmp_path)
    shutil.rmtree(run_path(tmp_path, arm.runs[0]).parent / "tune")  # the trials would be trained again
    before = sorted(tmp_path.rglob("*"))
    words = ["run", FROZEN.id, BASELINE.id, "--scale", "smoke", "--runs", str(tmp_path)]
    assert main([*words, *change, *dry_run]) == 2
    said = capsys.readouterr().err
    assert "seed=42 contains a run with a different config" in said
    assert "data.max_length: " in said or "tune.grid: " in said
    assert "optim.lr: " not in said  # not chosen yet
    assert sorted(tmp_path.rglob("*")) == before


def test_a_grid_does_not_grow_without_end(tmp_path: Path) -> None:
    tuned = tune(arms(FROZEN), tmp_path, TrialWriter(tmp_path, {FROZEN.id: 1e-9}), say=quiet)
    assert len(tuned.arms[0].runs[0].tune.grid) == len(GRID) + 3
    assert tuned.choices[0].at_edge
    assert "at the edge of the grid" in str(tuned.choices[0])


def test_an_arm_that_is_added_later_gets_the_grid_of_the_runs_that_exist(tmp_path: Path) -> None:
    """Their grid grew when they were tuned; the runs keep their settings, and the new arm is comparable."""
    writer, said = TrialWriter(tmp_path, {BASELINE.id: 1e-3, FROZEN.id: 1e-9}), []
    (baseline,) = tune(arms(BASELINE), tmp_path, writer, say=quiet).arms
    assert baseline.runs[0].tune.grid == (5e-4, *GRID)
    make_jobs(baseline.runs, tmp_path)
    for named in ((FROZEN,), (BASELINE, FROZEN)):
        tuned = tune(arms(*named), tmp_path, writer, say=said.append)
        assert {arm.runs[0].tune.grid for arm in tuned.arms} == {(5e-4, *GRID)}
    assert tuned.arms[0].runs == baseline.runs
    assert "0.0005, 0.001, 0.002, 0.004, 0.008, as for the runs that exist already" in said[0]
    wider = tune(arms(FROZEN, grid=(1e-4, 2e-4)), tmp_path, writer, say=quiet)  # asked for by the user
    assert 1e-4 in wider.arms[0].runs[0].tune.grid


def test_a_diverged_learning_rate_loses(tmp_path: Path) -> None:
    planned = arms(FROZEN, grid=(1e-2, 3e-2, 9e-2))
    tuned = tune(planned, tmp_path, TrialWriter(tmp_path, {FROZEN.id: 9e-2}), say=quiet)
    assert tuned.choices[0].lr == 3e-2
    assert tuned.choices[0].to_dict()["losses"]["0.09"] == [None]


def test_if_all_trials_diverge_the_arm_is_a_problem_and_the_others_are_tuned(tmp_path: Path) -> None:
    writer = TrialWriter(tmp_path, {BASELINE.id: 2e-3})
    hot = replace(FROZEN, group="another", grids={"smoke": (1.0, 2.0)})
    tuned = tune(arms(BASELINE, hot, grid=()), tmp_path, writer, say=quiet)
    assert [arm.id for arm in tuned.arms] == [BASELINE.id]
    assert "no learning rate of the grid 1, 2 gave a finite validation loss" in tuned.problems[0]


def test_a_failed_trial_stops_its_comparison_only(tmp_path: Path) -> None:
    class Failing(TrialWriter):
        def write(self, job: Job) -> None:
            if job.config.id == FROZEN.id:
                job.state, job.reason = "failed", "device lost"
            else:
                super().write(job)

    said: list[str] = []
    other = replace(FROZEN, group="another")
    writer = Failing(tmp_path, {BASELINE.id: 2e-3})
    tuned = tune(arms(BASELINE, other), tmp_path, writer, say=said.append)
    assert (tuned.stopped, [arm.id for arm in tuned.arms]) == ("failed", [BASELINE.id])
    assert any("not all tuning trials have ended" in line for line in said)


def test_trials_that_do_not_fit_into_a_budget_are_not_started(tmp_path: Path) -> None:
    writer = TrialWriter(tmp_path, {FROZEN.id: 2.1e-3})
    tuned = tune(arms(FROZEN), tmp_path, writer, affordable=lambda t: t[: 3 - len(writer.trials)], say=quiet)
    assert (tuned.stopped, len(writer.trials)) == ("budget", 3)
    assert tune(arms(FROZEN), tmp_path, writer, say=quiet).choices[0].lr == 2e-3
    assert len(writer.trials) == len(set(writer.trials)) == 6


def test_the_hash_of_a_trial_does_not_depend_on_its_grid() -> None:
    (arm,) = arms(FROZEN)
    small, large = (trial_configs(arm, grid) for grid in (GRID[:2], GRID))
    assert config_hash(small[0]) == config_hash(large[0])
    assert config_hash(small[0]) != config_hash(large[-1])


def test_one_trial_seed_and_a_learning_rate_of_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="too few trial seeds"):
        arms(FROZEN, seeds=(1000,))
    with pytest.raises(UsageError, match="must be finite and above 0"):
        arms(FROZEN, grid=(0.0,))


def test_a_choice_needs_all_trials(tmp_path: Path) -> None:
    planned = arms(FROZEN)
    tune(planned, tmp_path, TrialWriter(tmp_path, {FROZEN.id: 2e-3}), say=quiet)
    RunFolder(run_path(tmp_path, trial_configs(planned[0], GRID)[0])).status_file.unlink()
    with pytest.raises(OelmError, match="not started"):
        TuningGroup(planned, tmp_path).choose(planned[0])


def test_trials_that_disagree_show_that_another_choice_was_likely(tmp_path: Path) -> None:
    between = {FROZEN.id: math.sqrt(2e-3 * 4e-3) * 0.98}
    sure, unsure = (
        tune(arms(FROZEN), root, TrialWriter(root, between, noise), say=quiet).choices[0]
        for root, noise in ((tmp_path / "a", 1e-5), (tmp_path / "b", 0.1))
    )
    assert (sure.lr, unsure.lr) == (2e-3, 2e-3)
    assert sure.repeated == pytest.approx(1)
    assert sure.sd == pytest.approx(0, abs=1e-6)
    assert 0.5 < unsure.repeated < 0.7
    assert 0.01 < unsure.sd < 0.03  # about half the difference between the two learning rates
    assert "new trials would choose it in" in str(unsure)


def test_the_probability_of_a_choice_is_that_of_the_normal_distribution() -> None:
    losses = {1e-3: [2.0, 2.2], 2e-3: [2.1, 2.3]}
    again = choice_probabilities(losses, sd=0.1)  # means differ by 0.1 = 1 sd of the difference of two means
    assert again[1e-3] == pytest.approx(0.8413, abs=1e-4)
    assert choice_sd(again, {1e-3: 2.1, 2e-3: 2.2}) == pytest.approx(
        0.1 * math.sqrt(0.8413 * 0.1587), abs=1e-4
    )


def test_what_a_seed_does_to_all_learning_rates_is_not_noise_of_the_choice() -> None:
    assert trial_sd([{1e-3: [2.0, 2.5], 2e-3: [2.1, 2.6]}]) == pytest.approx(0)
    assert trial_sd([{1e-3: [2.0, 2.2], 2e-3: [2.2, 2.0]}]) == pytest.approx(0.2)
    assert trial_sd([{1e-3: [2.0], 2e-3: [2.2]}]) is None


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
    def trial_budget(id: str, share: float) -> tuple[int, int]:
        (arm,) = Request([replace(experiment(id), trial_share=share)], ("mini",)).arms()
        budget = trial_configs(arm, (1e-3,))[0].budget
        return budget.steps, budget.epochs

    steps = experiment("GAP-TS-baseline").at("mini").budget.steps
    assert trial_budget("GAP-TS-baseline", 0.5) == (steps // 2, 0)
    assert trial_budget("GAP-TS-baseline", 1e-9) == (1, 0)
    assert trial_budget("FT-SST2-baseline", 0.5) == trial_budget("FT-SST2-baseline", 0.1) == (0, 1)
