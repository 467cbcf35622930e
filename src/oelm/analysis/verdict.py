"""Rules of the study, decided on the interval: an outcome only when the whole interval agrees.

A rule cuts the line of possible differences into regions. The interval lies in one region: that is the
outcome. It crosses a cut: undecided, with the number of seeds that would probably settle it.
The 95 % interval makes each one-sided claim wrong in at most 2.5 % of cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

from oelm.analysis.statistics import LEVEL, Estimate, is_wide

TARGET = 0.05  # the study: a loss of at most 5 % against the baseline
GOAL = 0.01  # ours, of frozen language models: at most 1 % above the same architecture with trained Q/K
SCENARIO_A = -2.0  # points of accuracy, phase 4
SCENARIO_B = -5.0
POWER = 0.8
MOST_SEEDS = 50  # more is no realistic plan

MET, MISSED = "met", "missed"
BETTER, WORSE = "better", "worse"
UNDECIDED, NO_INTERVAL, REFUSED = "undecided", "no interval", "refused"
WITHHELD = "withheld"  # compared, but not judged: see `guards.caveats`


@dataclass(frozen=True)
class Rule:
    """`regions[i]` lies below `cuts[i]`, the last region above all cuts."""

    name: str
    cuts: tuple[float, ...]
    regions: tuple[str, ...]


# The scales: log ratio of perplexity, log ratio of accuracy, points of accuracy.
PPL_TARGET = Rule("target", (math.log1p(TARGET),), (MET, MISSED))
PPL_GOAL = Rule("goal", (math.log1p(GOAL),), (MET, MISSED))
ACCURACY_TARGET = Rule("target", (math.log1p(-TARGET),), (MISSED, MET))
SCENARIO = Rule("scenario", (SCENARIO_B, SCENARIO_A), ("B", "C", "A"))
PPL_SIGN = Rule("sign", (0.0,), (BETTER, WORSE))
ACCURACY_SIGN = Rule("sign", (0.0,), (WORSE, BETTER))


@dataclass(frozen=True)
class SeedsNeeded:
    """How many seeds in all would settle a rule with 80 % power if the figures stay as they are now."""

    seeds: int | None
    limit: str = ""  # why there is no number: "spread" (unknown), "wide", "test set" (too small), "too close"
    have: int = 0  # seeds there are, for "wide"


@dataclass(frozen=True)
class Verdict:
    rule: str
    outcome: str  # a region, or one of UNDECIDED, NO_INTERVAL, REFUSED, WITHHELD
    possible: tuple[str, ...] = ()  # the regions the interval touches
    needed: SeedsNeeded | None = None
    reason: str = ""  # why the interval does not decide: "diverged", "chance", "caveat", "identical", ...

    @property
    def decided(self) -> bool:
        return self.outcome not in (UNDECIDED, NO_INTERVAL, REFUSED, WITHHELD)


def decide(rule: Rule, estimate: Estimate, *, withhold: str = "") -> Verdict:
    """The rule's outcome, or why it is withheld whatever the interval says: "diverged" (a diverged seed is an
    outcome too, and it is left out of the estimate), "chance" (the reference learned nothing to lose) or
    "caveat" (the comparison is not fair, or not on the data it names).

    >>> from oelm.analysis.statistics import difference
    >>> decide(SCENARIO, difference({0: 81.0, 1: 80.8, 2: 81.1}, {0: 81.2, 1: 81.1, 2: 81.0})).outcome
    'A'
    """
    if withhold == "caveat":
        return Verdict(rule.name, WITHHELD, reason=withhold)
    if estimate.interval is None:
        return Verdict(rule.name, NO_INTERVAL, needed=SeedsNeeded(None, "spread"))
    low, high = estimate.interval
    possible = rule.regions[_region(rule, low) : _region(rule, high) + 1]
    if withhold:  # more seeds would not settle it
        return Verdict(rule.name, UNDECIDED, possible, reason=withhold)
    if low == high:  # no spread at all is no precision: the seeds, or the arms, are copies of each other
        return Verdict(
            rule.name, UNDECIDED, possible, reason="no variation" if estimate.value else "identical"
        )
    if len(possible) > 1 and is_wide(estimate, points=rule is SCENARIO):
        return Verdict(rule.name, UNDECIDED, possible, SeedsNeeded(None, "wide", estimate.n))
    if len(possible) > 1:
        return Verdict(rule.name, UNDECIDED, possible, seeds_needed(rule, estimate))
    return Verdict(rule.name, possible[0], possible)


def _region(rule: Rule, value: float) -> int:
    """A value on a cut belongs to the region above it: the study says '>= -2 points: A'. For the
    perplexity target the study says '<= 1.05', which differs on a set of measure zero."""
    return sum(value >= cut for cut in rule.cuts)


def seeds_needed(rule: Rule, estimate: Estimate) -> SeedsNeeded:
    """Smallest number of paired seeds whose interval would leave out the nearest cut with 80 % power,
    taking today's difference and spread as the truth. A planning figure: both are estimates themselves."""
    if estimate.seed_sd is None:
        return SeedsNeeded(None, "spread")
    distance = min(abs(estimate.value - cut) for cut in rule.cuts)
    for n in range(2, MOST_SEEDS + 1):
        if _power(n, distance, estimate.seed_sd, estimate.test_se) >= POWER:
            return SeedsNeeded(n)
    z = float(stats.norm.ppf(0.5 + LEVEL / 2) + stats.norm.ppf(POWER))
    return SeedsNeeded(None, "test set" if z * estimate.test_se >= distance else "too close")


def _power(n: int, distance: float, sd: float, test_se: float) -> float:
    """Chance that the interval of n seeds lies on the right side of a cut `distance` away."""
    t = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1))
    se = sd / math.sqrt(n)
    if test_se == 0:  # exact: the one-sample t test
        return 1.0 if se == 0 else float(stats.nct.sf(t, n - 1, distance / se))
    z = float(stats.norm.ppf(0.5 + LEVEL / 2))
    margin = distance - math.hypot(t * se, z * test_se)
    return float(stats.norm.cdf(margin / math.hypot(se, test_se)))
