"""`oelm decide` with tuned arms: budget, kills and wrong settings, with a launcher that writes ended runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.config.run_config import DataConfig
from oelm.errors import UsageError
from oelm.experiments.decide.forecast import forecast, plans_of
from oelm.experiments.decide.look import Design, check_settings, look_at
from oelm.experiments.decide.loop import DecideOutcome, exit_code
from oelm.experiments.decide.study import make_design, tune_and_decide
from oelm.experiments.experiment import Experiment
from oelm.experiments.launch.jobs import Events, Job, skip_if_ended
from oelm.experiments.request import ArmPlan, Request
from oelm.report.digest import build_digest
from oelm.report.formats.markdown import to_markdown
from oelm.report.report import write_html
from oelm.runs.scan import scan
from run_factory import analyze, write_run


def experiment(id: str, method: str, baseline: str = "") -> Experiment:
    return Experiment(
        id=id,
        study="tuned",
        task="lm",
        data=DataConfig("stories"),
        method=method,
        baseline=baseline,
        tuned=True,
        grids={"smoke": (1e-3, 3e-3, 9e-3)},
    )


BASE, FROZEN = experiment("T-BASE", "baseline"), experiment("T-FROZEN", "oelm-freeze", "T-BASE")
TRIALS = 2 * (3 + 2)


class Killed(BaseException):
    """Stands for SIGKILL: no code of the package handles it."""


class WritingLauncher:
    """Writes runs and trials of 60 s; T-FROZEN is 20 % worse. May be killed before its `die_at`-th run."""

    def __init__(self, root: Path, die_at: int = -1) -> None:
        self.root, self.die_at, self.count = root, die_at, 0

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]:
        for job in jobs:
            if skip_if_ended(job, Events()):
                continue
            if self.count == self.die_at:
                raise Killed
            self.count += 1
            c = job.config
            loss = random.Random(f"{c.id} {c.optim.lr} {c.seed}").gauss(2, 0.01)
            loss += (0.2 if c.id == FROZEN.id else 0.0) + abs(math.log(c.optim.lr / 3e-3)) / 50
            write_run(self.root, c, math.exp(loss), test=not c.tune.trial)
            job.state = "finished"
        return jobs


def decide(root: Path, die_at: int = -1, budget: float = math.inf, **changes: float) -> DecideOutcome:
    settings = {name.replace("__", "."): value for name, value in changes.items()}
    arms = Request([BASE, FROZEN], ("smoke",), (0,), settings).arms()
    design = make_design(arms, 6, ("target",))
    return tune_and_decide(
        arms,
        design,
        root,
        WritingLauncher(root, die_at),
        width=2,
        budget=budget,
        guess=dict.fromkeys(design.by_arm(), 120.0),
        say=lambda _: None,
    )


def answers(outcome: DecideOutcome) -> list[tuple[object, ...]]:
    tuned = [(c.id, c.lr) for c in outcome.choices]
    return [tuned, *((q.state, q.n, q.estimate and q.estimate.interval) for q in outcome.questions)]


def test_killed_at_any_moment_also_of_the_tuning_the_decisions_are_the_same(tmp_path: Path) -> None:
    whole = decide(tmp_path / "whole")
    assert [(q.state, q.n) for q in whole.questions] == [("missed", 3)]
    assert exit_code(whole) == 0
    assert sum(job.config.tune.trial for job in whole.jobs) == TRIALS
    for moment in range(0, len(whole.jobs), 3):
        root = tmp_path / str(moment)
        with pytest.raises(Killed):
            decide(root, die_at=moment)
        assert answers(decide(root)) == answers(whole)


def test_the_budget_limits_tuning_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    stopped = decide(tmp_path, budget=200.0)
    assert (stopped.stopped, exit_code(stopped)) == ("budget", 3)
    assert len(scan(tmp_path)) == 3  # trials of 60 s; the first were expected to take half of a run of 120 s
    assert stopped.look.spent_seconds <= 200
    further = decide(tmp_path, budget=60.0 * (TRIALS + 1))
    assert (further.stopped, len(further.choices)) == ("budget", 2)
    assert len(scan(tmp_path)) == TRIALS  # the next look needs six runs, which do not fit
    assert answers(decide(tmp_path)) == answers(decide(tmp_path / "whole"))


def test_runs_with_other_settings_are_refused_before_a_trial_starts(tmp_path: Path) -> None:
    decide(tmp_path)
    count = len(scan(tmp_path))
    with pytest.raises(UsageError, match=r"different settings(.|\n)*budget.batch_size: 4 -> 8"):
        decide(tmp_path, budget__batch_size=8)
    assert len(scan(tmp_path)) == count


def test_another_grid_than_that_of_the_runs_is_refused_before_a_trial_starts(tmp_path: Path) -> None:
    decide(tmp_path)
    arms = Request([BASE, FROZEN], ("smoke",), (0,), grid=(2e-3, 5e-3)).arms()
    with pytest.raises(UsageError, match=r"different settings(.|\n)*tune.grid: .* -> \[0.002, 0.005\]"):
        check_settings(make_design(arms, 6, ("target",)), tmp_path)
    smaller = Request([BASE, FROZEN], ("smoke",), (0,), grid=(1e-3, 3e-3)).arms()  # may grow
    check_settings(make_design(smaller, 6, ("target",)), tmp_path)


def test_the_questions_of_a_new_arm_are_open_before_its_tuning(tmp_path: Path) -> None:
    decide(tmp_path)
    new = experiment("T-NEW", "oelm-random", "T-BASE")
    arms = Request([BASE, new], ("smoke",), (0,), {}).arms()
    assert [q.is_open for q in look_at(make_design(arms, 6, ("target",)), tmp_path).questions] == [True]


def design_of(*experiments: Experiment) -> tuple[list[ArmPlan], Design]:
    arms = Request(experiments, ("smoke",), (0,), {}).arms()
    return arms, make_design(arms, 6, ("target",))


def test_a_decided_study_is_decided_also_if_it_took_longer_than_the_budget(tmp_path: Path) -> None:
    whole = decide(tmp_path)
    again = decide(tmp_path, budget=1.0)
    assert (again.stopped, again.jobs) == ("", [])
    assert answers(again) == answers(whole)


def test_unequal_learning_rates_before_tuning_do_not_close_a_question(tmp_path: Path) -> None:
    _, design = design_of(BASE, replace(FROZEN, optim=replace(FROZEN.optim, lr=7e-3)))
    assert [q.is_open for q in look_at(design, tmp_path).questions] == [True]


def test_nothing_is_tuned_if_no_question_can_get_a_verdict(tmp_path: Path) -> None:
    """At smoke scale, built-in text stands for the dataset."""
    arms, design = design_of(*(replace(e, data=DataConfig("tinystories")) for e in (BASE, FROZEN)))
    outcome = tune_and_decide(arms, design, tmp_path, WritingLauncher(tmp_path), width=2, say=lambda _: None)
    assert (outcome.jobs, exit_code(outcome)) == ([], 3)
    assert "built-in generated text" in outcome.questions[0].why
    assert forecast(design, outcome.look, plans_of(design, tmp_path), arms, tmp_path).trials == 0


def test_the_plan_counts_the_tuning_trials_that_are_left_and_their_time(tmp_path: Path) -> None:
    arms, design = design_of(BASE, FROZEN)
    plans = plans_of(design, tmp_path)
    before = forecast(design, look_at(design, tmp_path), plans, arms, tmp_path)
    one_run = sum(plan.seconds or 0.0 for plan in plans.values()) / len(plans)
    assert before.trials == TRIALS
    assert before.trial_seconds == pytest.approx(TRIALS * one_run / 2)
    decide(tmp_path, budget=200.0)  # three trials of 60 s
    tuning = forecast(design, look_at(design, tmp_path), plans, arms, tmp_path)
    assert (tuning.trials, tuning.trial_seconds) == (TRIALS - 3, pytest.approx(60.0 * 2 + 0.5 * one_run * 5))
    decide(tmp_path)
    assert forecast(design, look_at(design, tmp_path), plans, arms, tmp_path).trials == 0
    # Runs whose trials had other seeds are tuned again.
    others = Request((BASE, FROZEN), ("smoke",), (0,), trial_seeds=(7, 8)).arms()
    assert forecast(design, look_at(design, tmp_path), plans, others, tmp_path).trials == TRIALS


def test_the_analysis_reports_how_much_the_choice_of_learning_rates_varies_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decide(tmp_path)
    (c,) = analyze(tmp_path).comparisons.made
    assert c.lr_choice_sd is not None
    assert 0 < c.lr_choice_sd < 0.03
    page = to_markdown(build_digest(analyze(tmp_path)), "figures")
    assert "| Tuning ± |" in page
    assert f"| ±{100 * c.lr_choice_sd:.2f} % |" in page
    assert "“Tuning ±” is the standard deviation that the choice of the learning rates adds" in page
    html = (write_html(analyze(tmp_path), tmp_path / "report.html")).read_text(encoding="utf-8")
    assert f"±{100 * c.lr_choice_sd:.2f}" in html  # followed by a space that does not break
    assert main(["analyze", "--runs", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert row["lr_choice_sd"] == pytest.approx(c.lr_choice_sd)
