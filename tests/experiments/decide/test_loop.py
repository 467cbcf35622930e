"""The loop of `oelm decide` with a launcher that writes finished runs, without training."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from oelm.analysis.questions import GIVEN_UP, NO_VERDICT
from oelm.config.run_config import QuestionConfig
from oelm.errors import OelmError, UsageError
from oelm.experiments.decide.look import Design, look_at
from oelm.experiments.decide.loop import decide_study, exit_code, lock_studies
from oelm.experiments.decide.next_runs import missing_runs, next_runs
from oelm.experiments.launch.jobs import Job
from oelm.files.locks import Busy
from oelm.report.sentences import why_undecided
from oelm.runs.progress import read_decide_progress
from oelm.runs.scan import scan
from run_factory import analyze, lm_config, write_run

BASE = lm_config()
FAR = lm_config("FAR", "oelm-freeze")  # 20 % worse than the baseline
NEAR = lm_config("NEAR", "oelm-random")  # on the 5 % margin
MEANS = {BASE.id: 0.0, "FAR": math.log(1.20), "NEAR": math.log(1.05)}


class Killed(BaseException):
    """Stands for SIGKILL: no code of the package handles it."""


class WritingLauncher:
    """Writes each run with a difference of 1 % between seeds; may be killed before its `die_at`-th run."""

    def __init__(self, root: Path, die_at: int = -1, state: str = "finished") -> None:
        self.root, self.die_at, self.state, self.count = root, die_at, state, 0

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]:
        for job in jobs:
            if self.count == self.die_at:
                raise Killed
            noise = random.Random(f"{job.config.id} {job.config.seed}").gauss(0, 0.01)
            write_run(self.root, job.config, 8 * math.exp(MEANS[job.config.id] + noise), state=self.state)
            job.state = self.state
            self.count += 1
        return jobs


def run(root: Path, *configs, width: int = 2, die_at: int = -1, **options):
    design = Design(configs, options.pop("max_seeds", 12), options.pop("rules", ("target",)))
    options = {"width": width, "say": lambda _: None, **options}
    return decide_study(design, root, WritingLauncher(root, die_at), **options)


def answers(outcome) -> dict[tuple[str, ...], tuple[str, int, tuple[float, float]]]:
    return {q.key: (q.state, q.n, q.estimate.interval) for q in outcome.questions}


def test_the_far_question_is_decided_early_and_the_near_one_given_up(tmp_path):
    outcome = run(tmp_path, BASE, FAR, NEAR)
    far, near = outcome.questions
    assert (far.state, far.n) == ("missed", 3)
    assert near.state == GIVEN_UP
    assert near.n < 12
    assert "too close to the margin" in near.why
    assert exit_code(outcome) == 3
    assert len([r for r in scan(tmp_path) if r.id == "FAR"]) == 3  # no run is spent on a closed question
    assert str(read_decide_progress(tmp_path / FAR.study)) == "1 of 2 questions decided, 1 given up"


def test_killed_at_any_moment_the_same_command_ends_with_the_same_decisions(tmp_path):
    undisturbed = run(tmp_path / "whole", BASE, FAR, NEAR, max_seeds=6)
    for moment in range(0, len(undisturbed.jobs), 3):
        root = tmp_path / str(moment)
        with pytest.raises(Killed):
            run(root, BASE, FAR, NEAR, max_seeds=6, die_at=moment)
        again = run(root, BASE, FAR, NEAR, max_seeds=6, width=1 + moment % 4)
        assert answers(again) == answers(undisturbed)


def test_the_number_of_slots_does_not_change_a_decision(tmp_path):
    outcomes = [answers(run(tmp_path / str(w), BASE, FAR, NEAR, width=w)) for w in (1, 16)]
    assert outcomes[0] == outcomes[1]


def test_a_second_call_starts_nothing(tmp_path):
    first = run(tmp_path, BASE, FAR)
    second = run(tmp_path, BASE, FAR)
    assert not second.jobs
    assert answers(first) == answers(second)
    assert exit_code(second) == 0


def test_runs_with_a_fixed_number_of_seeds_are_used(tmp_path):
    for config in (BASE, FAR):
        for seed in (4, 5):
            WritingLauncher(tmp_path).launch([Job(replace(config, seed=seed), tmp_path)])
    run(tmp_path, BASE, FAR)
    assert sorted(r.seed for r in scan(tmp_path) if r.id == "FAR") == [4, 5, 6]


def test_the_budget_ends_it_before_it_is_exceeded(tmp_path):
    """A written run takes 60 s, so 10 minutes are enough for ten of them."""
    outcome = run(tmp_path, BASE, FAR, NEAR, budget=600.0)
    assert outcome.stopped == "budget"
    assert outcome.look.spent_seconds <= 600
    assert exit_code(outcome) == 3
    longer = run(tmp_path, BASE, FAR, NEAR)
    assert answers(longer) == answers(run(tmp_path / "whole", BASE, FAR, NEAR))


def test_a_guess_that_is_too_short_exceeds_the_budget_by_the_first_runs_only(tmp_path):
    """A written run takes 60 s, not 1 s as guessed: after the first two, the budget is spent."""
    guess = {c.arm_key: 1.0 for c in (BASE, FAR, NEAR)}
    outcome = run(tmp_path, BASE, FAR, NEAR, budget=100.0, guess=guess)
    assert outcome.stopped == "budget"
    assert len(outcome.jobs) == 2


def test_a_diverged_seed_ends_only_its_own_question(tmp_path):
    write_run(tmp_path, replace(NEAR, seed=0))
    write_run(tmp_path, replace(NEAR, seed=1), state="diverged")
    outcome = run(tmp_path, BASE, FAR, NEAR)
    states = {q.arm.id: q for q in outcome.questions}
    assert states["NEAR"].state == NO_VERDICT
    assert "diverged and are not in the mean, so there is no verdict: NEAR seed 1" in states["NEAR"].why
    assert states["FAR"].state == "missed"
    near = next(c for c in analyze(tmp_path).comparisons.made if c.arm.id == "NEAR")
    assert (near.effect.n, near.target.reason) == (1, "diverged")  # not: run at least 3 seeds
    assert "diverged" in str(why_undecided(near.target))


def test_a_seed_that_diverges_after_the_verdict_does_not_change_it(tmp_path):
    before = answers(run(tmp_path, BASE, FAR))
    write_run(tmp_path, replace(FAR, seed=3), state="diverged")
    write_run(tmp_path, replace(BASE, seed=3))
    assert answers(run(tmp_path, BASE, FAR)) == before
    (c,) = analyze(tmp_path).comparisons.made
    assert (c.target.outcome, c.target.stopped) == ("missed", 3)


def test_a_run_that_has_ended_but_is_not_counted_is_an_error_and_no_endless_loop(tmp_path):
    class Forgetting(WritingLauncher):
        def launch(self, jobs):
            for job in jobs:
                job.state, job.ended_before = "finished", True
            return jobs

    design = Design((BASE, FAR), 12, ("target",))
    with pytest.raises(OelmError, match="has ended, but is not counted"):
        decide_study(design, tmp_path, Forgetting(tmp_path), width=2, say=lambda _: None)


def test_a_failed_run_stops_its_question_and_is_tried_again(tmp_path):
    class Failing(WritingLauncher):
        def launch(self, jobs):
            for job in jobs:
                job.state = "failed"
            return jobs

    design = Design((BASE, FAR), 12, ("target",))
    outcome = decide_study(design, tmp_path, Failing(tmp_path), width=2, say=lambda _: None)
    assert outcome.stopped == "failed"
    assert exit_code(outcome) == 1
    assert exit_code(run(tmp_path, BASE, FAR)) == 0


def test_seeds_that_exist_with_other_settings_are_refused(tmp_path):
    write_run(tmp_path, replace(FAR, seed=0, optim=replace(FAR.optim, lr=1e-3)))
    with pytest.raises(
        UsageError, match=r"seed=0 was trained with different settings(.|\n)*optim.lr: 0.001 -> 0.004"
    ):
        run(tmp_path, BASE, FAR)
    assert len(scan(tmp_path)) == 1  # nothing was started


def test_the_maximum_of_seeds_cannot_be_changed_after_looking(tmp_path):
    run(tmp_path, BASE, FAR, max_seeds=12)
    with pytest.raises(UsageError, match="--max-seeds 12"):
        run(tmp_path, BASE, FAR, max_seeds=20)


def test_a_study_without_questions_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no question to decide"):
        run(tmp_path, BASE)


def test_a_second_decide_says_who_holds_the_study(tmp_path):
    design = Design((BASE, FAR))
    with (
        lock_studies(design, tmp_path),
        pytest.raises(Busy, match=rf"another `oelm decide` works on .*paper: process {os.getpid()}"),
    ):
        lock_studies(design, tmp_path)


def test_shared_runs_count_for_all_their_questions(tmp_path):
    """Both questions need the baseline; the cheaper arm comes first, then the other without the baseline."""
    design = Design((BASE, FAR, NEAR), 12, ("target",))
    look = look_at(design, tmp_path)
    seconds = {q.arm.key: 60.0 for q in look.questions} | {look.questions[0].reference.key: 60.0}
    seconds[look.questions[1].arm.key] = 30.0
    batch = next_runs(look.questions, look.seeds, seconds, width=1)
    assert {arm[2] for arm, _ in batch} == {"GPT-01", "NEAR"}
    assert len(batch) == len(set(batch)) == 6
    wide = next_runs(look.questions, look.seeds, seconds, width=7)
    assert len(wide) == 9  # the baseline's three seeds once
    assert next_runs(look.questions, look.seeds, seconds, width=1, most_seconds=100.0) == []
    assert missing_runs(look.questions[0], look.seeds)[0] == (FAR_KEY, 0)


FAR_KEY = ("paper", "mini", "FAR")


def test_the_analysis_knows_the_sequential_rule_and_says_where_it_stopped(tmp_path):
    outcome = run(tmp_path, BASE, FAR, NEAR)
    far, near = analyze(tmp_path).comparisons.made
    assert (far.target.outcome, far.target.stopped, far.max_seeds) == ("missed", 3, 12)
    assert far.effect.interval == outcome.questions[0].estimate.interval
    assert far.effect.level > 0.98
    assert (near.target.outcome, near.target.needed.limit) == ("undecided", "given up")


def asking(config, *questions: QuestionConfig):
    return replace(config, compare=replace(config.compare, questions=questions))


def test_questions_of_a_study_file_replace_the_pre_set_ones(tmp_path):
    far = asking(FAR, QuestionConfig(BASE.id, "non-inferior", 0.1), QuestionConfig(BASE.id, "superior", 0.0))
    outcome = run(tmp_path, BASE, far)
    assert [(q.rule.name, q.state, q.n) for q in outcome.questions] == [
        ("non-inferior", "missed", 4),
        ("superior", "missed", 3),
    ]
    assert [q.comparison for q in outcome.questions] == ["baseline", "baseline"]
    control = replace(far, compare=replace(far.compare, baseline="", control=BASE.id))
    assert {q.comparison for q in look_at(Design((BASE, control)), tmp_path / "new").questions} == {"control"}
    answered = analyze(tmp_path).answers
    assert [(a.verdict.outcome, a.verdict.stopped) for a in answered] == [("missed", 4), ("missed", 3)]


def test_the_questions_cannot_be_changed_after_looking(tmp_path):
    run(tmp_path, BASE, asking(FAR, QuestionConfig(BASE.id, "non-inferior", 0.1)))
    with pytest.raises(UsageError, match="must not change after the first results"):
        run(tmp_path, BASE, asking(FAR, QuestionConfig(BASE.id, "non-inferior", 0.3)))


def test_a_margin_of_zero_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has a margin of zero"):
        run(tmp_path, BASE, asking(FAR, QuestionConfig(BASE.id, "non-inferior", 0.0)))
