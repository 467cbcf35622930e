"""The whole rule of `oelm decide` by simulation: wrong verdicts, questions given up, and seeds saved."""

from __future__ import annotations

import numpy as np
import pytest

from oelm.analysis.arms import Arm
from oelm.analysis.questions import GIVEN_UP, Question, take_look
from oelm.analysis.statistics.futility import chance_of_verdict, seeds_expected
from oelm.analysis.statistics.intervals import difference
from oelm.analysis.statistics.sequential import MIN_SEEDS, level_per_look
from oelm.analysis.verdict import EQUIVALENT, PPL_SIGN, SCENARIO, Rule

SEEDS = 20
RULE = Rule("target", (0.0,), ("met", "missed"))


def answer(differences: np.ndarray, rule: Rule = RULE) -> Question:
    """Look at 3, 4, ... paired seeds with these differences until the question is closed."""
    question = Question("baseline", Arm((), {}), Arm((), {}), rule)
    for n in range(MIN_SEEDS, len(differences) + 1):
        zeros = dict.fromkeys(range(n), 0.0)
        estimate = difference(dict(enumerate(differences[:n])), zeros, level=level_per_look(SEEDS))
        question = take_look(question, estimate, len(differences))
        if not question.is_open:
            return question
    raise AssertionError("the last look closes every question")


def simulate(distance: float, studies: int, rule: Rule = RULE, heavy: bool = False) -> list[Question]:
    rng = np.random.default_rng(1)
    size = studies, SEEDS
    noise = rng.standard_t(3, size) / np.sqrt(3) if heavy else rng.standard_normal(size)
    return [answer(study + distance, rule) for study in noise]


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "t with 3 degrees of freedom"])
def test_on_the_margin_at_most_5_percent_are_decided_and_the_others_given_up(heavy):
    """Every verdict is wrong here. Giving up comes long before the last seed."""
    studies = 400
    found = simulate(0.0, studies, heavy=heavy)
    assert sum(q.decided for q in found) / studies <= 0.05 + 2 * (0.05 * 0.95 / studies) ** 0.5
    assert {q.state for q in found if not q.decided} == {GIVEN_UP}
    assert np.mean([q.n for q in found]) < 10


@pytest.mark.parametrize(("distance", "seeds", "decided"), [(1.0, 10.5, 0.87), (2.0, 6.0, 0.99)])
def test_a_clear_difference_is_decided_with_fewer_than_12_seeds(distance, seeds, decided):
    found = simulate(distance, 150)
    assert np.mean([q.n for q in found]) < seeds
    assert np.mean([q.state == "missed" for q in found]) >= decided
    assert all(q.state != "met" for q in found)


def test_arms_that_do_not_differ_are_shown_equivalent():
    found = [
        answer(0.004 * study, PPL_SIGN) for study in np.random.default_rng(2).standard_normal((100, SEEDS))
    ]
    states = [q.state for q in found]
    assert states.count(EQUIVALENT) >= 85
    assert all(q.state in (EQUIVALENT, GIVEN_UP, "better", "worse") for q in found)
    assert states.count("better") + states.count("worse") <= 10


@pytest.mark.parametrize("test_se", [0.0, 0.3])
def test_the_prediction_agrees_with_what_happens_later(test_se: float):
    """Among questions with a predicted probability around 60 %, about 60 % are decided at that n."""
    rng = np.random.default_rng(3)
    level, predicted, happened = level_per_look(SEEDS), [], []
    for mean in rng.uniform(-2, 2, 400):
        d = rng.standard_normal(12) + mean + test_se * rng.standard_normal()  # one test set for all seeds

        def estimate(n: int, d: np.ndarray = d) -> object:
            zeros = dict.fromkeys(range(n), 0.0)
            return difference(dict(enumerate(d[:n])), zeros, test_se=test_se, level=level)

        p = chance_of_verdict(RULE, estimate(6), 12)
        low, high = estimate(12).interval
        if 0.2 < p < 0.8:
            predicted.append(p)
            happened.append(low > 0 or high < 0)
    assert len(predicted) > 50
    assert np.mean(happened) == pytest.approx(np.mean(predicted), abs=0.12)


def test_a_region_between_two_margins_can_be_predicted():
    """Scenario C lies between -5 and -2 points: reachable with a small spread, not with a large one."""
    for spread, expected in ((0.3, True), (3.0, False)):
        d = np.array([-3.5 - spread, -3.5, -3.5 + spread, -3.4, -3.6])
        estimate = difference(dict(enumerate(d)), dict.fromkeys(range(5), 0.0), level=level_per_look(SEEDS))
        assert (seeds_expected(SCENARIO, estimate, SEEDS) is not None) == expected
