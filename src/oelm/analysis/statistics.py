"""Differences between two arms over seeds, with intervals that say what they cover.

Every figure is made on an additive scale (log perplexity, accuracy, log accuracy) and turned back for
display. The interval that decides is Student's t over paired seeds. For accuracy the same finite test set
judges every seed, so its sampling error does not shrink with more seeds; it is estimated from the
predictions and added:

    half width^2 = (t(n-1) * seed standard error)^2 + (z * test-set standard error)^2

which is never narrower than either part alone (and a little conservative, see the simulations in the tests).
Three seeds can agree by luck. Which examples an arm gets right changes from seed to seed, and that alone
gives their mean a standard error, known well from the predictions: the first part is never less than z times
that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

LEVEL = 0.95
MIN_BOOTSTRAP = 5  # below this a bootstrap over seeds is far too narrow to be shown (27 resamples at n = 3)
MIN_SHARED = 3  # shared seeds that make a paired analysis of partly paired arms worth its lost seeds

WIDE_POINTS, WIDE_LOG = 100.0, math.log(4)  # see `is_wide`

Way = Literal["paired t", "Welch", "none"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """Arm minus reference. `interval` is None when there is nothing to make one from (n = 1)."""

    value: float
    interval: Interval | None
    way: Way
    n: int  # seeds of the arm that are used
    n_reference: int
    seed_sd: float | None  # of the paired differences; for Welch the pooled equivalent
    test_se: float = 0.0  # standard error from the finite test set, 0 when unknown or not added
    bootstrap: Interval | None = None  # BCa over the paired differences, seeds only
    p_value: float | None = None  # of "no difference", seeds only
    unpaired: tuple[int, ...] = ()  # seeds without a partner: left out (paired t) or the reason for Welch
    rest_se: float = 0.0  # what the seeds' part was held to at least, see `interaction_se`

    def exp(self) -> Estimate:
        """The same on the ratio scale; standard deviations stay on the log scale."""
        return replace(
            self,
            value=math.exp(self.value),
            interval=_exp(self.interval),
            bootstrap=_exp(self.bootstrap),
        )


def is_wide(estimate: Estimate, *, points: bool) -> bool:
    """Whether the interval is too wide to say anything: as wide as the scale of accuracy, or from a quarter
    of a perplexity to all of it."""
    if estimate.interval is None:
        return False
    low, high = estimate.interval
    return high - low > (WIDE_POINTS if points else WIDE_LOG)


def difference(
    arm: Mapping[int, float],
    reference: Mapping[int, float],
    *,
    test_se: float = 0.0,
    rest_se: float = 0.0,
    level: float = LEVEL,
) -> Estimate:
    """Mean of arm minus reference over seeds, paired where the seeds are.

    test_se, rest_se: of the examples that all seeds share and of what differs between seeds and examples at
    once (`example_se`, `interaction_se`).

    Seeds that match on both sides: paired t. Partners missing: paired on the shared seeds if there are
    at least three, else Welch over all. One seed on a side: the plain difference and no interval.

    >>> e = difference({0: 2.10, 1: 2.14, 2: 2.09}, {0: 2.00, 1: 2.02, 2: 2.01})
    >>> round(e.value, 3), e.way, e.n
    (0.1, 'paired t', 3)
    >>> difference({0: 2.1}, {0: 2.0}).interval is None
    True
    """
    if not arm or not reference:
        raise ValueError("both arms need at least one seed")
    shared = sorted(arm.keys() & reference.keys())
    alone = tuple(sorted(arm.keys() ^ reference.keys()))
    if len(shared) >= 2 and (not alone or len(shared) >= MIN_SHARED):
        return _paired([arm[s] - reference[s] for s in shared], alone, test_se, rest_se, level)
    if min(len(arm), len(reference)) >= 2:
        return _welch(list(arm.values()), list(reference.values()), alone, test_se, rest_se, level)
    if shared:  # compare like with like, even when one side has more seeds
        arm, reference = {s: arm[s] for s in shared}, {s: reference[s] for s in shared}
    value = float(np.mean(list(arm.values())) - np.mean(list(reference.values())))
    return Estimate(value, None, "none", len(arm), len(reference), None, test_se, unpaired=alone)


def _paired(
    d: Sequence[float], alone: tuple[int, ...], test_se: float, rest_se: float, level: float
) -> Estimate:
    n, value, sd = len(d), float(np.mean(d)), float(np.std(d, ddof=1))
    if sd > 0:
        result = stats.ttest_1samp(d, 0.0)
        seeds = result.confidence_interval(level)
        half, p = (float(seeds.high) - float(seeds.low)) / 2, float(result.pvalue)
    else:  # identical differences: scipy has nothing to divide by
        half, p = 0.0, (1.0 if value == 0 else 0.0)
    half, p = _at_least(rest_se, value, half, p, level)
    return Estimate(
        value,
        _widened(value, half, test_se, level),
        "paired t",
        n,
        n,
        max(sd, rest_se * math.sqrt(n)),
        test_se,
        bootstrap(d, level),
        p,
        alone,
        rest_se,
    )


def _welch(
    a: Sequence[float],
    b: Sequence[float],
    alone: tuple[int, ...],
    test_se: float,
    rest_se: float,
    level: float,
) -> Estimate:
    value = float(np.mean(a) - np.mean(b))
    variance = np.var(a, ddof=1) / len(a) + np.var(b, ddof=1) / len(b)
    n = min(len(a), len(b))
    if variance > 0:
        result = stats.ttest_ind(a, b, equal_var=False)
        seeds = result.confidence_interval(level)
        half, p = (float(seeds.high) - float(seeds.low)) / 2, float(result.pvalue)
    else:
        half, p = 0.0, (1.0 if value == 0 else 0.0)
    half, p = _at_least(rest_se, value, half, p, level)
    sd = math.sqrt(max(float(variance), rest_se**2) * n)  # what n paired seeds would need for the same error
    interval = _widened(value, half, test_se, level)
    return Estimate(value, interval, "Welch", len(a), len(b), sd, test_se, None, p, alone, rest_se)


def bootstrap(d: Sequence[float], level: float = LEVEL) -> Interval | None:
    """BCa interval of the mean by scipy; None where it would not be worth its name."""
    if len(d) < MIN_BOOTSTRAP or np.ptp(d) == 0:
        return None
    result = stats.bootstrap(
        (np.asarray(d, dtype=float),),
        np.mean,
        confidence_level=level,
        method="BCa",
        n_resamples=4999,
        rng=np.random.default_rng(0),  # the same runs give the same report
    ).confidence_interval
    low, high = float(result.low), float(result.high)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def example_se(*blocks: np.ndarray) -> float:
    """Standard error that the choice of test examples gives to a difference, seeds held fixed.

    Each block is (seeds, examples) of per-example contributions; their sum of seed means is the
    contrast. Paired seeds: one block, arm minus reference. Unpaired: the arm, and minus the reference.
    In the crossed model x[s, i] = mean + seed[s] + example[i] + rest[s, i] this estimates
    sd(example) / sqrt(m): the part that more seeds do not remove. The rest is already in the spread of
    the seeds and is taken out here. With a single seed the two cannot be told apart and nothing is taken
    out: for one paired seed this is the standard error behind McNemar's test.
    """
    examples = blocks[0].shape[1]
    if examples < 2:
        return 0.0
    contrast = np.sum([b.mean(axis=0) for b in blocks], axis=0)  # (m,)
    rest = interaction_se(*blocks) ** 2
    return math.sqrt(max(0.0, float(np.var(contrast, ddof=1)) / examples - rest))


def interaction_se(*blocks: np.ndarray) -> float:
    """Standard error that rest[s, i] alone gives to the mean over seeds; blocks as in `example_se`."""
    return math.sqrt(sum(_interaction(b) / b.size for b in blocks))


def _interaction(block: np.ndarray) -> float:
    """Mean square of the seed x example interaction of a (seeds, examples) block."""
    n, m = block.shape
    if n < 2 or m < 2:
        return 0.0
    rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
    return float((rest**2).sum() / ((n - 1) * (m - 1)))


def binomial_se(accuracy: float, reference: float, examples: int) -> float:
    """Test-set standard error of an accuracy difference when the predictions are lost: it ignores that
    both arms answered the same questions, so it is too wide rather than too narrow."""
    return math.sqrt((accuracy * (1 - accuracy) + reference * (1 - reference)) / max(1, examples))


def mcnemar(arm: np.ndarray, reference: np.ndarray) -> float:
    """Exact two-sided p value that two models are right equally often, from per-example hits (0/1)."""
    gained = int(np.sum((arm == 1) & (reference == 0)))
    lost = int(np.sum((arm == 0) & (reference == 1)))
    if gained + lost == 0:
        return 1.0
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue)


def trend(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """Kendall's tau and its exact p value; None below five points, where no order can be significant
    enough to speak of one."""
    if len(x) < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    result = stats.kendalltau(x, y)
    return float(result.statistic), float(result.pvalue)


def _at_least(rest_se: float, value: float, half: float, p: float, level: float) -> tuple[float, float]:
    """A half width and a p value of the seeds, where these agree more than their examples let them."""
    if rest_se == 0:
        return half, p
    z = float(stats.norm.ppf(0.5 + level / 2))
    return max(half, z * rest_se), max(p, 2 * float(stats.norm.sf(abs(value) / rest_se)))


def _widened(value: float, half: float, test_se: float, level: float) -> Interval:
    z = float(stats.norm.ppf(0.5 + level / 2))
    half = math.hypot(half, z * test_se)
    return value - half, value + half


def _exp(interval: Interval | None) -> Interval | None:
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
