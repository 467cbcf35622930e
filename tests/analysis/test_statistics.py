"""Statistics against scipy, and by simulation: coverage of the intervals, error rates of the verdicts."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from oelm.analysis import verdict as v
from oelm.analysis.statistics import intervals as s


def seeds(values) -> dict[int, float]:
    return dict(enumerate(float(x) for x in values))


finite = st.floats(-5, 5, allow_nan=False)


@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=12))
@settings(max_examples=60, deadline=None)
def test_paired_interval_is_scipys(pairs):
    a, b = np.array(pairs).T
    estimate = s.difference(seeds(a), seeds(b))
    assert estimate.interval_kind == "paired t"
    assert estimate.n == len(pairs)
    assert estimate.value == pytest.approx(np.mean(a - b), abs=1e-12)
    if np.std(a - b) > 1e-6:
        oracle = stats.ttest_rel(a, b)
        assert estimate.interval == pytest.approx(tuple(oracle.confidence_interval(0.95)), rel=1e-6, abs=1e-9)


def test_unpaired_seeds_use_welch_and_are_named():
    a, b = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 0.9, 3: 1.0, 4: 0.7}
    estimate = s.difference(a, b)
    oracle = stats.ttest_ind(list(a.values()), list(b.values()), equal_var=False)
    assert estimate.interval_kind == "Welch"
    assert estimate.unpaired == (1, 2, 3, 4)
    assert estimate.interval == pytest.approx(tuple(oracle.confidence_interval(0.95)))


def test_three_shared_seeds_stay_paired_and_the_others_are_named():
    estimate = s.difference({0: 1.0, 1: 2.0, 2: 3.5, 9: 99.0}, {0: 0.9, 1: 1.7, 2: 3.0})
    assert (estimate.interval_kind, estimate.n, estimate.unpaired) == ("paired t", 3, (9,))
    assert estimate.value == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("arm", "reference"), [({0: 2.0}, {0: 1.0}), ({0: 2.0}, {1: 1.0}), ({0: 2.0}, {0: 1.0, 1: 5.0, 2: 6.0})]
)
def test_one_seed_has_no_interval_and_no_verdict(arm, reference):
    estimate = s.difference(arm, reference)
    assert estimate.interval is None
    assert estimate.value == pytest.approx(1.0)  # only the shared seed is used if there is one
    verdict = v.decide(v.PPL_TARGET, estimate)
    assert verdict.outcome == v.NO_INTERVAL
    assert not verdict.decided


def test_ratio_scale_is_the_exponential_of_the_log_scale():
    estimate = s.difference(seeds(np.log([5.0, 5.5, 5.2])), seeds(np.log([4.0, 4.6, 4.1])))
    ratio = estimate.exp()
    assert ratio.value == pytest.approx(stats.gmean([5.0 / 4.0, 5.5 / 4.6, 5.2 / 4.1]))
    assert ratio.interval == pytest.approx(tuple(math.exp(x) for x in estimate.interval))


def test_identical_seeds_give_an_interval_of_width_zero():
    estimate = s.difference(seeds([1.0, 1.0]), seeds([1.0, 1.0]))
    assert estimate.interval == (0.0, 0.0)
    assert s.difference(seeds([2.0, 2.0]), seeds([1.0, 1.0])).interval == (1.0, 1.0)


def test_one_seed_test_set_error_is_that_of_paired_proportions():
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 2, (2, 1, 400))
    gained, lost = np.sum((a == 1) & (b == 0)), np.sum((a == 0) & (b == 1))
    textbook = math.sqrt((gained + lost - (gained - lost) ** 2 / 400) / 399 / 400)
    assert s.example_se(a - b) == pytest.approx(textbook, rel=1e-2)


def test_binomial_fallback_is_wider_than_the_paired_error_of_agreeing_models():
    rng = np.random.default_rng(0)
    reference = (rng.random((3, 2000)) < 0.8).astype(float)
    flips = rng.random((3, 2000)) < 0.1
    arm = np.where(flips, 1 - reference, reference)
    assert s.example_se(arm - reference) < s.binomial_se(arm.mean(), reference.mean(), 2000)


# --- simulation ------------------------------------------------------------------------------------------


def simulated_accuracy(rng, *, n, m, seed_sd, example_sd, rest_sd, mean=0.0):
    """One study in the crossed model: per-example differences (n seeds, m examples)."""
    return (
        mean
        + rng.normal(0, seed_sd, (n, 1))
        + rng.normal(0, example_sd, (1, m))
        + rng.normal(0, rest_sd, (n, m))
    )


@pytest.fixture
def quick(monkeypatch):
    """Skip the seed planning, which is slow and not under test in a simulation."""
    monkeypatch.setattr(v, "seeds_needed", lambda *_: None)


def paired(d):
    """The estimate of arms whose seeds differ by `d`."""
    return s.difference(dict(enumerate(d)), dict.fromkeys(range(len(d)), 0.0))


@pytest.mark.parametrize("n", [2, 3, 10])
@pytest.mark.usefixtures("quick")
def test_paired_interval_covers_95_percent(n):
    rng = np.random.default_rng(n)
    hits, repeats = 0, 1500
    for d in rng.normal(0.07, 0.03, (repeats, n)):
        low, high = paired(d).interval
        hits += low <= 0.07 <= high
    assert 0.933 <= hits / repeats <= 0.967  # three standard errors of the simulation


@pytest.mark.parametrize(
    ("seed_sd", "example_sd", "rest_sd"),
    [(0.01, 0.0, 0.3), (0.0, 0.4, 0.1), (0.01, 0.3, 0.3), (0.02, 0.1, 0.1), (0.002, 0.5, 0.2)],
)
@pytest.mark.parametrize("n", [3, 5])
def test_combined_interval_covers_at_least_95_percent(n, seed_sd, example_sd, rest_sd):
    """Over fresh seeds *and* a fresh test set, whichever of the two dominates."""
    rng = np.random.default_rng(17)
    repeats, m, hits = 600, 300, 0
    for _ in range(repeats):
        block = simulated_accuracy(rng, n=n, m=m, seed_sd=seed_sd, example_sd=example_sd, rest_sd=rest_sd)
        d = block.mean(axis=1)
        half = stats.t.ppf(0.975, n - 1) * d.std(ddof=1) / math.sqrt(n)
        low, high = s._add_test_error(float(d.mean()), float(half), s.example_se(block), 0.95)
        hits += low <= 0.0 <= high
    assert hits / repeats >= 0.93  # 0.95 minus two standard errors; conservative is allowed


@pytest.mark.parametrize(
    ("documents", "text_sd", "seed_sd"), [(15, 0.1, 0.002), (60, 0.1, 0.01), (60, 0.0, 0.01)]
)
def test_the_interval_over_seeds_and_documents_covers_at_least_95_percent(documents, text_sd, seed_sd):
    """The documents differ in length and in the arms' difference; both are drawn anew in each repeat."""
    rng = np.random.default_rng(5)
    repeats, hits = 500, 0
    for _ in range(repeats):
        tokens = rng.integers(50, 400, documents)
        per_token = 0.02 + rng.normal(0, text_sd, documents) + rng.normal(0, seed_sd, (3, 1))
        losses = tokens * (per_token + rng.normal(0, 0.02, (3, documents)))
        d = losses.sum(axis=1) / tokens.sum()
        block = s.loss_block(losses, tokens)
        assert block.mean(axis=1) == pytest.approx(d)
        estimate = s.difference(
            dict(enumerate(d)),
            dict.fromkeys(range(3), 0.0),
            test_se=s.few_documents_factor(tokens) * s.example_se(block),
            interaction_se=s.interaction_se(block),
        )
        hits += estimate.interval[0] <= 0.02 <= estimate.interval[1]
    assert hits / repeats >= 0.93


def test_seeds_that_agree_by_chance_do_not_give_a_narrow_interval():
    """Three seeds, each with 85 examples that only one arm gets right and 85 only the other: no spread."""
    rng = np.random.default_rng(0)
    block = np.stack([rng.permutation([1.0] * 85 + [-1.0] * 85 + [0.0] * 830) for _ in range(3)])
    seeds = dict(enumerate(block.mean(axis=1)))
    naive = s.difference(seeds, dict.fromkeys(seeds, 0.0), test_se=s.example_se(block))
    found = s.difference(
        seeds, dict.fromkeys(seeds, 0.0), test_se=s.example_se(block), interaction_se=s.interaction_se(block)
    )
    textbook = 1.96 * math.sqrt(0.17 / 1000 / 3)  # McNemar's, over three independent seeds
    assert naive.interval[1] < textbook / 2
    assert found.interval[1] == pytest.approx(textbook, rel=0.05)
    assert found.seed_sd == pytest.approx(math.sqrt(0.17 / 1000), rel=0.05)


@pytest.mark.usefixtures("quick")
def test_an_interval_over_seeds_alone_misses_the_test_set_error():
    """Without the test-set term, an interval covers too rarely when the test set dominates."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        block = simulated_accuracy(rng, n=5, m=300, seed_sd=0.002, example_sd=0.5, rest_sd=0.1)
        low, high = paired(block.mean(axis=1)).interval
        hits += low <= 0.0 <= high
    assert hits / 400 < 0.5


def test_a_bootstrap_over_three_seeds_covers_too_rarely():
    rng = np.random.default_rng(11)
    hits = 0
    for d in rng.normal(0, 1, (200, 3)):
        means = rng.choice(d, (999, 3)).mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        hits += low <= 0 <= high
    assert hits / 200 < 0.88


def outcomes(rule, true, sd, n, repeats=1500):
    """Outcome -> its share of the simulated studies."""
    rng = np.random.default_rng(0)
    counts = Counter(v.decide(rule, paired(d)).outcome for d in rng.normal(true, sd, (repeats, n)))
    return {name: count / repeats for name, count in counts.items()}


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.usefixtures("quick")
def test_wrong_verdicts_at_the_margin_are_rare(n):
    """With the true difference at the margin, each side is claimed in at most 2.5 % of studies."""
    rates = outcomes(v.PPL_TARGET, math.log(1.05), 0.02, n)
    assert rates.get(v.MET, 0) <= 0.037
    assert rates.get(v.MISSED, 0) <= 0.037


@pytest.mark.usefixtures("quick")
def test_scenarios_are_found_and_rarely_wrong():
    assert outcomes(v.SCENARIO, -1.0, 0.4, 5, repeats=300).get("A", 0) > 0.8
    assert outcomes(v.SCENARIO, -7.0, 0.4, 5, repeats=300).get("B", 0) > 0.95
    assert outcomes(v.SCENARIO, -3.5, 0.4, 5, repeats=300).get("C", 0) > 0.95
    wrong = outcomes(v.SCENARIO, -2.01, 0.4, 5)
    assert wrong.get("A", 0) <= 0.037
    assert wrong.get("B", 0) == 0


# --- verdicts --------------------------------------------------------------------------------------------


def estimate_at(value, half, *, n=3, sd=0.02, test_se=0.0):
    return s.Estimate(value, (value - half, value + half), "paired t", n, n, sd, test_se)


@pytest.mark.parametrize(
    ("rule", "value", "half", "outcome"),
    [
        (v.PPL_TARGET, math.log(1.02), 0.01, v.MET),
        (v.PPL_TARGET, math.log(1.09), 0.02, v.MISSED),
        (v.PPL_TARGET, math.log(1.05), 0.02, v.UNDECIDED),
        (v.ACCURACY_TARGET, math.log(0.99), 0.01, v.MET),
        (v.ACCURACY_TARGET, math.log(0.90), 0.01, v.MISSED),
        (v.SCENARIO, 0.0, 1.0, "A"),
        (v.SCENARIO, -1.9, 0.1, "A"),  # ">= -2 points"
        (v.SCENARIO, -4.9, 0.1, "C"),  # "< -5 points" is B
        (v.SCENARIO, -3.5, 1.0, "C"),
        (v.SCENARIO, -8.0, 1.0, "B"),
        (v.SCENARIO, -2.0, 1.0, v.UNDECIDED),
        (v.PPL_SIGN, -0.1, 0.05, v.BETTER),
        (v.ACCURACY_SIGN, -0.1, 0.05, v.WORSE),
        (v.PPL_SIGN, 0.001, 0.005, v.EQUIVALENT),
        (v.ACCURACY_SIGN, -0.001, 0.005, v.EQUIVALENT),
        (v.PPL_SIGN, 0.006, 0.005, v.WORSE),  # a small difference is still a difference
        (v.PPL_SIGN, 0.004, 0.007, v.UNDECIDED),  # up to 1.1 %
        (v.PPL_TARGET, 0.001, 0.005, v.MET),
    ],
)
def test_decisions(rule, value, half, outcome):
    assert v.decide(rule, estimate_at(value, half)).outcome == outcome


def test_undecided_lists_the_possible_outcomes():
    verdict = v.decide(v.SCENARIO, estimate_at(-3.0, 3.0, sd=1.2))
    assert verdict.possible == ("B", "C", "A")
    assert verdict.needed is not None
    assert verdict.needed.seeds is not None
    assert verdict.needed.seeds > 3


def test_a_diverged_seed_prevents_a_verdict():
    for spread in (0.01, 0.2):  # also where the interval alone would not decide
        verdict = v.decide(v.PPL_TARGET, estimate_at(0.0, spread), withhold="diverged")
        assert (verdict.outcome, verdict.reason) == (v.UNDECIDED, "diverged")
        assert verdict.needed is None


def test_a_test_set_whose_error_is_below_the_distance_is_not_called_too_small():
    """All seeds have the same test set, so a new choice of test rows must not count against a verdict."""
    near = estimate_at(-0.032, 0.036, sd=0.02, test_se=0.012)  # 1.96 test_se < 0.032 < (1.96 + 0.84) test_se
    assert v.seeds_needed(v.ACCURACY_SIGN, near).seeds == 6


def test_no_number_of_seeds_is_given_if_none_would_be_enough():
    assert v.seeds_needed(v.SCENARIO, estimate_at(-2.3, 2.0, sd=0.5, test_se=1.0)).limit == "test set"
    assert v.seeds_needed(v.PPL_TARGET, estimate_at(math.log(1.05), 0.02, n=30)).limit == "too close"


def test_trend_needs_five_points():
    assert s.trend([1, 2, 3, 4], [1, 2, 3, 4]) is None
    tau, p = s.trend([1, 2, 3, 4, 5], [2, 4, 6, 8, 10])
    assert tau == pytest.approx(1.0)
    assert p == pytest.approx(stats.kendalltau(range(5), range(5)).pvalue)
