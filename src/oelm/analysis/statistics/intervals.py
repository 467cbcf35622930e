"""Estimate the difference between two arms over seeds, with a confidence interval.

Differences are computed on an additive scale: log perplexity, points of accuracy or log accuracy. The
confidence interval is Student's t over paired seeds. All seeds are evaluated on the same finite test set, so
the sampling error of the test set does not shrink with more seeds. This error is estimated from the
predictions, or from the loss per document, and added to the half width of the interval:

    half_width^2 = (t(n-1) * seed_se)^2 + (z * test_se)^2

With few seeds the spread between seeds can be small by chance. But the predictions (or losses) show precisely
how much single examples vary between seeds, and this gives a lower bound for the seed error
(`interaction_se()`). The first term is never smaller than the square of z times that bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from scipy import special  # not scipy.stats, which takes a second to import

LEVEL = 0.95
MIN_SHARED = 3  # if the arms' seeds differ: with fewer shared seeds, use Welch's test over all seeds
MAX_WIDTH_POINTS, MAX_WIDTH_LOG = 100.0, math.log(4)  # a wider confidence interval carries no information

IntervalKind = Literal["paired t", "Welch", "none"]
Interval = tuple[float, float]


@cache
def t_quantile(level: float, df: float) -> float:
    """Return the half width, in standard errors, of a two-sided Student's t interval."""
    return float(special.stdtrit(df, 0.5 + level / 2))


@cache
def z_quantile(level: float) -> float:
    """Return the half width, in standard errors, of a two-sided interval of the normal distribution."""
    return float(special.ndtri(0.5 + level / 2))


@dataclass(frozen=True)
class Estimate:
    """The estimated difference "arm minus reference" and its confidence interval (None with one seed)."""

    value: float
    interval: Interval | None
    interval_kind: IntervalKind
    n: int  # number of seeds of the arm that were used
    n_reference: int  # number of seeds of the reference that were used
    # Standard deviation of the paired differences. For Welch's test, the standard deviation that min(n,
    # n_reference) paired differences would need for the same standard error. None with one seed.
    seed_sd: float | None
    test_se: float = 0.0  # standard error from the choice of test examples; 0 if unknown
    unpaired: tuple[int, ...] = ()  # seeds that only one arm has: not used for "paired t", used for "Welch"
    interaction_se: float = 0.0  # lower bound of the standard error over seeds; see `interaction_se()`
    level: float = LEVEL  # confidence level of the interval

    def exp(self) -> Estimate:
        """Return this log-scale estimate as a ratio; standard deviations and errors stay on the log scale."""
        interval = None if self.interval is None else (math.exp(self.interval[0]), math.exp(self.interval[1]))
        return replace(self, value=math.exp(self.value), interval=interval)


def is_wide(estimate: Estimate, *, points: bool) -> bool:
    """Return whether the interval is too wide to be informative.

    points: the estimate is in points of accuracy, and the limit is 100 points; otherwise it is a log ratio,
        and the limit is a factor of 4
    """
    if estimate.interval is None:
        return False
    low, high = estimate.interval
    return high - low > (MAX_WIDTH_POINTS if points else MAX_WIDTH_LOG)


def difference(
    arm: Mapping[int, float],
    reference: Mapping[int, float],
    *,
    test_se: float = 0.0,
    interaction_se: float = 0.0,
    level: float = LEVEL,
) -> Estimate:
    """Estimate the mean of arm minus reference from their scores per seed.

    If both arms have the same seeds, the interval is a paired t interval. Otherwise it is a paired t interval
    over the shared seeds if there are at least three, or else Welch's t interval over all seeds. If an arm
    has only one seed, there is no interval.

    test_se: result of `example_se()`; 0 if the results of single examples are unknown
    interaction_se: result of `interaction_se()`; 0 in the same case

    >>> e = difference({0: 2.10, 1: 2.14, 2: 2.09}, {0: 2.00, 1: 2.02, 2: 2.01})
    >>> round(e.value, 3), e.interval_kind, e.n
    (0.1, 'paired t', 3)
    >>> difference({0: 2.1}, {0: 2.0}).interval is None
    True
    """
    if not arm or not reference:
        raise ValueError("an arm has no seeds; both arms need at least one")
    shared = sorted(arm.keys() & reference.keys())
    unpaired = tuple(sorted(arm.keys() ^ reference.keys()))
    if len(shared) >= 2 and (not unpaired or len(shared) >= MIN_SHARED):
        differences = [arm[s] - reference[s] for s in shared]
        return _paired_t(differences, unpaired, test_se, interaction_se, level)
    if min(len(arm), len(reference)) >= 2:
        return _welch_t(
            list(arm.values()), list(reference.values()), unpaired, test_se, interaction_se, level
        )
    if shared:
        arm, reference = {s: arm[s] for s in shared}, {s: reference[s] for s in shared}
    value = float(np.mean(list(arm.values())) - np.mean(list(reference.values())))
    return Estimate(
        value, None, "none", len(arm), len(reference), None, test_se, unpaired=unpaired, level=level
    )


def _paired_t(
    d: Sequence[float], unpaired: tuple[int, ...], test_se: float, interaction_se: float, level: float
) -> Estimate:
    n, value, sd = len(d), float(np.mean(d)), float(np.std(d, ddof=1))
    half = _half_width(sd / math.sqrt(n), n - 1, interaction_se, level)
    return Estimate(
        value,
        _add_test_error(value, half, test_se, level),
        "paired t",
        n,
        n,
        max(sd, interaction_se * math.sqrt(n)),
        test_se,
        unpaired,
        interaction_se,
        level,
    )


def _welch_t(
    a: Sequence[float],
    b: Sequence[float],
    unpaired: tuple[int, ...],
    test_se: float,
    interaction_se: float,
    level: float,
) -> Estimate:
    value = float(np.mean(a) - np.mean(b))
    variances = [float(np.var(x, ddof=1)) / len(x) for x in (a, b)]
    total = sum(variances)
    # Welch-Satterthwaite degrees of freedom
    df = total**2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (a, b), strict=True)) if total else 1.0
    half = _half_width(math.sqrt(total), df, interaction_se, level)
    n = min(len(a), len(b))
    # The standard deviation that n paired differences would need for the same standard error.
    sd = math.sqrt(max(total, interaction_se**2) * n)
    interval = _add_test_error(value, half, test_se, level)
    return Estimate(value, interval, "Welch", len(a), len(b), sd, test_se, unpaired, interaction_se, level)


def _half_width(se: float, df: float, interaction_se: float, level: float) -> float:
    """Return the half width of a t interval over seeds.

    interaction_se: lower bound of the standard error, used because `se` can be small by chance
    """
    return max(t_quantile(level, df) * se, z_quantile(level) * interaction_se)


def _add_test_error(value: float, half: float, test_se: float, level: float) -> Interval:
    """Return the interval value ± half, widened by the sampling error of the test set."""
    half = math.hypot(half, z_quantile(level) * test_se)
    return value - half, value + half


def example_se(*blocks: np.ndarray) -> float:
    """Return the standard error of a difference that comes from the choice of test examples.

    Each block is a (seeds, examples) array, and the difference is the sum of the means of the blocks. With
    paired seeds there is one block, arm minus reference. With unpaired seeds there are two blocks, the arm
    and the negated reference.

    In the crossed model x[s, i] = mean + seed[s] + example[i] + rest[s, i], the result is sd(example) divided
    by the square root of the number of examples: more seeds do not reduce this error. The variance of
    rest[s, i] is not included, because the spread between seeds already contains it. With one seed,
    example[i] and rest[s, i] cannot be separated and both are included, so that one paired seed gives the
    standard error of McNemar's test.
    """
    examples = blocks[0].shape[1]
    if examples < 2:
        return 0.0
    per_example = np.sum([b.mean(axis=0) for b in blocks], axis=0)
    rest = interaction_se(*blocks) ** 2
    return math.sqrt(max(0.0, float(np.var(per_example, ddof=1)) / examples - rest))


def interaction_se(*blocks: np.ndarray) -> float:
    """Return a lower bound of the standard error over seeds, estimated from single test examples.

    Which examples are predicted correctly varies between seeds. The result is the part of the standard error
    that comes from this variation. In the model x[s, i] = mean + seed[s] + example[i] + rest[s, i] of
    `example_se()`, it is the standard error of the mean of rest[s, i].

    blocks: as in `example_se()`
    """
    return math.sqrt(sum(_interaction_variance(b) / b.size for b in blocks))


def _interaction_variance(block: np.ndarray) -> float:
    """Return the mean square of the seed x example interaction of a (seeds, examples) array."""
    n, m = block.shape
    if n < 2 or m < 2:
        return 0.0
    rest = block - block.mean(axis=0) - block.mean(axis=1, keepdims=True) + block.mean()
    return float((rest**2).sum() / ((n - 1) * (m - 1)))


def loss_block(losses: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return a (seeds, documents) array for `example_se()`; the mean of a row is the seed's loss per token.

    losses: (seeds, documents) array with the summed loss of each document
    tokens: number of tokens of each document

    Documents differ in length, so the mean loss per token is a ratio: sum of losses / sum of tokens. Its
    error comes from the difference between the loss of each document and the loss expected from its length.

    >>> loss_block(np.array([[6.0, 3.0]]), np.array([2, 1]))
    array([[3., 3.]])
    """
    per_token = losses.sum() / (len(losses) * tokens.sum())
    return per_token + (losses - per_token * tokens) / tokens.mean()


def few_documents_factor(tokens: np.ndarray, level: float = LEVEL) -> float:
    """Return t / z, a factor for a standard error that was estimated from few documents.

    `difference()` multiplies the standard error by the normal quantile z. The factor replaces z by the larger
    t quantile.

    tokens: number of tokens of each document; long documents have more weight
    """
    effective = tokens.sum() ** 2 / (tokens**2).sum()
    return t_quantile(level, max(1.0, float(effective) - 1)) / z_quantile(level)


def binomial_se(
    accuracy: float, reference: float, examples: int, scales: tuple[float, float] = (1.0, 1.0)
) -> float:
    """Return the standard error, from a test set of `examples` rows, of the difference of two accuracies.

    It is used if the predictions of single examples are missing. It ignores that both arms were tested on the
    same examples, so it is too large rather than too small.

    scales: factors by which the two accuracies are multiplied
    """
    variances = [x * (1 - x) / max(1, examples) for x in (accuracy, reference)]
    return math.hypot(*(scale * math.sqrt(v) for scale, v in zip(scales, variances, strict=True)))


def trend(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """Return (Kendall's tau, its p-value) of two lists.

    Returns None if a list is constant, or with fewer than five points, because tau is then never significant.
    """
    if len(x) < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    from scipy import stats

    result = stats.kendalltau(x, y)
    return float(result.statistic), float(result.pvalue)
