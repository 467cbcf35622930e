"""Predict whether more seeds will decide a question, from the seeds that have run so far.

The prediction takes into account that the true mean and variance are unknown: after n paired seeds with mean
m and standard deviation s, the mean over N > n seeds is distributed as m + s sqrt((N - n) / (N n)) T, where T
has Student's t distribution with n - 1 degrees of freedom (a flat prior for mean and log variance). So a
question is not given up just because its first three seeds happen to lie on a margin. All seeds have the same
test set, so its error widens the interval but does not move the mean over further seeds. The prediction is
used only for planning: no verdict is computed from it, and giving up a question cannot cause a wrong verdict.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from scipy.special import stdtr

from oelm.analysis.statistics.intervals import Estimate, t_quantile, z_quantile

if TYPE_CHECKING:
    from oelm.analysis.verdict import Rule

GIVE_UP = 0.15  # give a question up below this probability of a verdict with the maximum number of seeds


def chance_of_verdict(rule: Rule, estimate: Estimate, seeds: int) -> float:
    """Return the predicted probability that an interval from `seeds` paired seeds decides `rule`.

    estimate: the difference after the paired seeds that have run so far

    >>> from oelm.analysis.statistics.intervals import difference
    >>> from oelm.analysis.verdict import PPL_TARGET
    >>> near = difference({0: 0.06, 1: 0.04, 2: 0.05}, {0: 0.0, 1: 0.0, 2: 0.0})
    >>> far = difference({0: 0.01, 1: -0.01, 2: 0.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    >>> chance_of_verdict(PPL_TARGET, near, 10) < 0.5 < chance_of_verdict(PPL_TARGET, far, 10)
    True
    """
    sd, n = estimate.seed_sd, min(estimate.n, estimate.n_reference)
    if not sd or n < 2 or seeds <= n:
        return 0.0
    half = math.hypot(t_quantile(estimate.level, seeds - 1) * sd / math.sqrt(seeds), _test_half(estimate))
    spread = sd * math.sqrt((seeds - n) / (seeds * n))
    return sum(
        float(stdtr(n - 1, (high - estimate.value) / spread) - stdtr(n - 1, (low - estimate.value) / spread))
        for low, high in _deciding_means(rule, half)
    )


def seeds_expected(rule: Rule, estimate: Estimate, max_seeds: int) -> int | None:
    """Return the smallest number of seeds above the present one that makes a verdict more likely than not.

    Returns None if this number is above `max_seeds`.
    """
    for seeds in range(estimate.n + 1, max_seeds + 1):
        if chance_of_verdict(rule, estimate, seeds) >= 0.5:
            return seeds
    return None


def seeds_can_decide(rule: Rule, estimate: Estimate) -> bool:
    """Return whether infinitely many seeds with the present mean would decide `rule` on this test set."""
    ranges = _deciding_means(rule, _test_half(estimate))
    return any(low <= estimate.value <= high for low, high in ranges)


def _test_half(estimate: Estimate) -> float:
    """Return the half width of the interval that the test set causes, which no number of seeds reduces."""
    return z_quantile(estimate.level) * estimate.test_se


def _deciding_means(rule: Rule, half: float) -> list[tuple[float, float]]:
    """Return disjoint ranges of the mean for which the interval mean ± `half` decides the rule."""
    borders = [-math.inf, *rule.margins, math.inf]
    ranges = [*itertools.pairwise(borders), (-rule.equivalence, rule.equivalence)]
    merged: list[tuple[float, float]] = []
    for low, high in sorted((low + half, high - half) for low, high in ranges):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged
