"""Sequential checks by simulation: at most 5 % wrong decisions over all checks, with fewer seeds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oelm.analysis.statistics.intervals import difference
from oelm.analysis.statistics.sequential import LEVELS, MAX_SEEDS, MIN_SEEDS, level_per_look

STUDIES, SEEDS = 20_000, 20
DIFFERENCES = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "t with 3 degrees of freedom": lambda rng, size: rng.standard_t(3, size),
    "Laplace": lambda rng, size: rng.laplace(size=size),
    "difference of exponentials": lambda rng, size: rng.exponential(size=size) - rng.exponential(size=size),
}


def p_values(differences: np.ndarray) -> np.ndarray:
    """Two-sided p-values of a zero mean at every check: (studies, seeds) -> (studies, checks)."""
    n = np.arange(1, differences.shape[1] + 1)
    mean = differences.cumsum(axis=1) / n
    variance = (np.square(differences).cumsum(axis=1) - n * mean**2) / np.maximum(n - 1, 1)
    checks = slice(MIN_SEEDS - 1, None)
    t = np.abs(mean[:, checks]) / np.sqrt(np.maximum(variance[:, checks], 1e-300) / n[checks])
    return 2 * stats.t.sf(t, n[checks] - 1)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_at_most_5_percent_wrong_decisions_over_all_checks(name):
    """The true difference is exactly at the margin, the worst case: every decision is wrong."""
    differences = DIFFERENCES[name](np.random.default_rng(1), (STUDIES, SEEDS))
    wrong = (p_values(differences) < 1 - level_per_look(SEEDS)).any(axis=1).mean()
    assert wrong <= 0.05 + 3 * (0.05 * 0.95 / STUDIES) ** 0.5  # 3 standard errors of the simulation


def test_checking_a_plain_95_percent_interval_after_every_seed_is_wrong_too_often():
    differences = np.random.default_rng(2).standard_normal((STUDIES, SEEDS))
    assert (p_values(differences) < 0.05).any(axis=1).mean() > 0.2


def test_a_large_difference_is_decided_after_few_seeds():
    """Two standard deviations from its margin: about 6 of 20 seeds."""
    differences = np.random.default_rng(3).standard_normal((STUDIES, SEEDS)) + 2.0
    decided = p_values(differences) < 1 - level_per_look(SEEDS)
    assert decided.any(axis=1).all()
    assert 4.5 < (decided.argmax(axis=1) + MIN_SEEDS).mean() < 6.5


def test_intervals_of_difference_at_this_level_give_the_simulated_decisions():
    level = level_per_look(SEEDS)
    for study in np.random.default_rng(4).standard_normal((20, 8)) + 1.0:
        for n, p in zip(range(MIN_SEEDS, 9), p_values(study[None])[0], strict=True):
            low, high = difference(
                dict(enumerate(study[:n])), dict.fromkeys(range(n), 0.0), level=level
            ).interval
            assert p == pytest.approx(stats.ttest_1samp(study[:n], 0.0).pvalue)
            assert (low > 0 or high < 0) == (p < 1 - level)


def test_the_table_agrees_with_a_simulation():
    normal = np.random.default_rng(7).standard_normal((100_000, SEEDS))
    smallest = np.minimum.accumulate(p_values(normal), axis=1)  # smallest p-value of the checks so far
    simulated = np.quantile(smallest, 0.05, axis=0)
    assert LEVELS[: len(simulated)] == pytest.approx(simulated, rel=0.06)


def test_the_method_page_shows_the_levels_that_are_used():
    page = (Path(__file__).parents[2] / "docs" / "method.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (N|α\(N\)) \| (.*) \|$", page, re.MULTILINE))
    seeds, shown = (row.split(" | ") for row in (rows["N"], rows["α(N)"]))
    for count, percent in zip(map(int, seeds), shown, strict=True):
        assert float(percent.removesuffix(" %")) == pytest.approx(100 * LEVELS[count - MIN_SEEDS], abs=0.006)


def test_more_checks_need_a_stricter_level():
    assert list(LEVELS) == sorted(LEVELS, reverse=True)
    assert level_per_look(MIN_SEEDS) == 0.95
    for seeds in (MIN_SEEDS - 1, MAX_SEEDS + 1):
        with pytest.raises(ValueError, match="between 3 and 50"):
            level_per_look(seeds)
