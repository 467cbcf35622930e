"""Comparisons of arms whose number of seeds `oelm decide` chose, from synthetic run folders."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from oelm.analysis.questions import answer_questions
from oelm.analysis.verdict import MET, UNDECIDED, SeedsNeeded
from oelm.config.run_config import RunConfig
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from run_factory import analyze, lm_config, write_run

VALUES = (8.0, 8.1, 8.2)


def decided(config: RunConfig) -> RunConfig:
    """The config of a run that `oelm decide` started."""
    return replace(config, compare=replace(config.compare, max_seeds=12))


def test_a_first_seed_that_diverged_does_not_stop_the_analysis_of_a_sequential_study(tmp_path: Path) -> None:
    for seed, value in enumerate(VALUES):
        state = "diverged" if seed == 0 else "finished"
        write_run(tmp_path, decided(lm_config(seed=seed)), value)
        write_run(tmp_path, decided(lm_config("GPT-02", "oelm-freeze", seed=seed)), value, state=state)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert (c.target.outcome, c.target.reason) == (UNDECIDED, "diverged")


def test_the_goal_keeps_the_look_that_decided_it(tmp_path: Path) -> None:
    """Three seeds meet the 1 % goal; the seeds that other questions need afterwards would not."""
    for seed, change in enumerate((-0.0061, -0.0019, -0.0040, 0.03, 0.03, *[0.0] * 7)):
        write_run(tmp_path, decided(lm_config(seed=seed)), 9.5 + 0.005 * (seed % 2))
        write_run(tmp_path, decided(lm_config("GPT-01O", "orthogonal-init", seed=seed)))
        config = decided(lm_config("GPT-02", "oelm-freeze", seed=seed))
        config = replace(config, compare=replace(config.compare, control="GPT-01O"))
        write_run(tmp_path, config, 8.0 * math.exp(change))
    analysis = analyze(tmp_path)
    (c,) = analysis.comparisons.of("control")
    assert c.goal is not None
    assert (c.goal.outcome, c.goal.stopped) == (MET, 3)
    assert [goal.outcome for goal in analysis.goals] == [MET]


def test_an_analysis_expects_as_many_seeds_as_oelm_decide(tmp_path: Path) -> None:
    for seed, change in enumerate((0.05, 0.11, 0.12, 0.14)):
        write_run(tmp_path, decided(lm_config(seed=seed)), 8.0)
        write_run(tmp_path, decided(lm_config("GPT-02", "oelm-freeze", seed=seed)), 8.0 * math.exp(change))
    analysis = analyze(tmp_path)
    (c,) = analysis.comparisons.of("baseline")
    questions = answer_questions(analysis.comparisons.arms, range(12), 12, ["target"])
    (expected,) = [q.expected for q in questions if q.reference.id == c.reference.id]
    assert c.target.needed == SeedsNeeded(expected)
    assert expected is not None


def test_a_run_that_never_started_does_not_hold_up_a_sequential_comparison(tmp_path: Path) -> None:
    for seed, value in enumerate(VALUES, start=5):
        write_run(tmp_path, decided(lm_config(seed=seed)), value)
        write_run(tmp_path, decided(lm_config("GPT-02", "oelm-freeze", seed=seed)), 1.2 * value + seed / 100)
    pending = lm_config("GPT-02", "oelm-freeze", seed=0)
    RunFolder(run_path(tmp_path, pending)).claim(pending)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert c.effect is not None
    assert c.effect.n == 3


def test_a_seed_that_is_missing_before_others_is_named(tmp_path: Path) -> None:
    for seed in range(5):
        write_run(tmp_path, decided(lm_config(seed=seed)), 8.0 + 0.01 * seed)
        if seed != 1:
            write_run(tmp_path, decided(lm_config("GPT-02", "oelm-freeze", seed=seed)), 9.0 + 0.012 * seed)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert any("seed 1 has not ended in both arms" in str(flag) for flag in c.flags)


def test_a_sequential_comparison_that_lacks_its_first_seed_says_so(tmp_path: Path) -> None:
    for seed, value in enumerate(VALUES):
        write_run(tmp_path, decided(lm_config(seed=seed)), value)
    write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=1))
    comparisons = analyze(tmp_path).comparisons
    assert comparisons.made == ()
    assert "waiting for seed 0, which has not ended in both arms" in str(comparisons.waiting[0])
