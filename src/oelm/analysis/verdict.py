"""Reach a verdict by applying a rule, such as "at most 5 % worse", to a confidence interval.

A rule divides the possible differences into regions, separated by its margins. If the whole interval lies in
one region, that region is the outcome. If the interval contains a margin, the verdict is undecided, and says
how many seeds would probably decide it. With a 95 % confidence interval, each verdict about one margin is
wrong in at most 2.5 % of studies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oelm.analysis.statistics.futility import seeds_can_decide, seeds_expected
from oelm.analysis.statistics.intervals import Estimate, is_wide
from oelm.config.run_config import QuestionConfig

TARGET = 0.05  # target of the original study: at most 5 % worse than the baseline
GOAL = 0.01  # goal of frozen language models: perplexity at most 1 % above that of the control
EQUIVALENCE = 0.01  # arms that differ by less than 1 % either way are equivalent
SCENARIO_A, SCENARIO_B = -2.0, -5.0  # margins of the original study's scenarios, in points of accuracy
_ROUNDING = 1e-12  # smaller differences of scores are rounding errors
MAX_PLANNED_SEEDS = 50  # `seeds_needed()` does not suggest more seeds than this

MET, MISSED = "met", "missed"
BETTER, WORSE, EQUIVALENT = "better", "worse", "equivalent"
UNDECIDED = "undecided"
# Outcomes without a verdict: one seed gives no interval; the arms are not comparable; or the comparison has a
# caveat (see guards.py).
NO_INTERVAL, REFUSED, WITHHELD = "no interval", "refused", "withheld"


@dataclass(frozen=True)
class Rule:
    """A division of the possible differences into regions, which are the possible outcomes.

    The margins are the borders of the regions, in ascending order: `regions[i]` lies below `margins[i]`, and
    the last region lies above all margins. An interval that contains a margin but lies within ± `equivalence`
    gives the outcome "equivalent".
    """

    name: str
    margins: tuple[float, ...]
    regions: tuple[str, ...]
    equivalence: float = 0.0


# Rules for the log ratio of perplexity (lower is better):
PPL_TARGET = Rule("target", (math.log1p(TARGET),), (MET, MISSED))
PPL_GOAL = Rule("goal", (math.log1p(GOAL),), (MET, MISSED))
PPL_SIGN = Rule("sign", (0.0,), (BETTER, WORSE), math.log1p(EQUIVALENCE))
# Rules for the log ratio of accuracy (higher is better):
ACCURACY_TARGET = Rule("target", (math.log1p(-TARGET),), (MISSED, MET))
ACCURACY_SIGN = Rule("sign", (0.0,), (WORSE, BETTER), math.log1p(EQUIVALENCE))
# The original study's scenario rule, for the difference in points of accuracy:
SCENARIO = Rule("scenario", (SCENARIO_B, SCENARIO_A), ("B", "C", "A"))


def question_rule(question: QuestionConfig, *, perplexity: bool) -> Rule:
    """Return the rule of a question in a study file; it applies to the log ratio of the metric.

    >>> question_rule(QuestionConfig("BASE", "non-inferior", 0.05), perplexity=False).regions
    ('missed', 'met')
    """
    better = -1 if perplexity else 1  # sign of the log ratio if the arm is better than the reference
    worst, best = (math.log1p(sign * better * question.margin) for sign in (-1, 1))
    if question.rule == "equivalent":
        low, high = sorted((worst, best))
        return Rule(question.rule, (low, high), (MISSED, MET, MISSED))
    margin = worst if question.rule == "non-inferior" else best
    return Rule(question.rule, (margin,), (MET, MISSED) if perplexity else (MISSED, MET))


@dataclass(frozen=True)
class SeedsNeeded:
    """The number of seeds that makes a verdict more likely than not; `oelm decide` expects the same."""

    seeds: int | None
    # Why `seeds` is None: "spread" (the spread between seeds is unknown), "wide" (the interval is too wide),
    # "test set" (the test set is too small), "too close" (the difference is too close to a margin), or
    # "given up" (`oelm decide` gave the question up).
    limit: str = ""
    have: int = 0  # the current number of seeds; set only if `limit` is "wide"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a rule for one comparison."""

    rule: str  # `Rule.name`, such as "target"
    outcome: str  # a region, EQUIVALENT, UNDECIDED, NO_INTERVAL, REFUSED or WITHHELD
    possible: tuple[str, ...] = ()  # the regions that the interval touches
    needed: SeedsNeeded | None = None
    # Why the interval gives no verdict: "diverged", "chance", "caveat", "no variation" or "identical"
    reason: str = ""
    stopped: int = 0  # number of seeds at which `oelm decide` closed the question; 0 if it did not

    @property
    def decided(self) -> bool:
        return self.outcome not in (UNDECIDED, NO_INTERVAL, REFUSED, WITHHELD)


def decide(
    rule: Rule, estimate: Estimate, *, withhold: str = "", max_seeds: int = MAX_PLANNED_SEEDS
) -> Verdict:
    """Return the verdict of a rule for an estimated difference.

    withhold: why no verdict may be given: "caveat" or a result of `guards.undecidable()`; otherwise ""
    max_seeds: an undecided verdict suggests at most this number of seeds; 0 = suggest none, which is faster

    >>> from oelm.analysis.statistics.intervals import difference
    >>> decide(SCENARIO, difference({0: 81.0, 1: 80.8, 2: 81.1}, {0: 81.2, 1: 81.1, 2: 81.0})).outcome
    'A'
    """
    if withhold == "caveat":
        return Verdict(rule.name, WITHHELD, reason=withhold)
    if estimate.interval is None:
        needed = None if withhold else SeedsNeeded(None, "spread")
        return Verdict(rule.name, NO_INTERVAL, needed=needed, reason=withhold)
    low, high = estimate.interval
    possible = rule.regions[_region(rule, low) : _region(rule, high) + 1]
    if withhold:  # `needed` is not set, because more seeds would not help
        return Verdict(rule.name, UNDECIDED, possible, reason=withhold)
    # Without variation between seeds, the runs are probably copies of each other.
    if low == high or (estimate.seed_sd is not None and estimate.seed_sd < _ROUNDING):
        reason = "no variation" if abs(estimate.value) > _ROUNDING else "identical"
        return Verdict(rule.name, UNDECIDED, possible, reason=reason)
    if len(possible) == 1:
        return Verdict(rule.name, possible[0], possible)
    if -rule.equivalence < low and high < rule.equivalence:
        return Verdict(rule.name, EQUIVALENT, possible)
    if is_wide(estimate, points=rule is SCENARIO):
        return Verdict(rule.name, UNDECIDED, possible, SeedsNeeded(None, "wide", estimate.n))
    needed = seeds_needed(rule, estimate, max_seeds) if max_seeds else None
    return Verdict(rule.name, UNDECIDED, possible, needed)


def _region(rule: Rule, value: float) -> int:
    """Return the index of the region that contains `value`; a value on a margin is in the region above."""
    return sum(value >= margin for margin in rule.margins)


def seeds_needed(rule: Rule, estimate: Estimate, max_seeds: int = MAX_PLANNED_SEEDS) -> SeedsNeeded:
    """Return the number of seeds that makes a verdict more likely than not, or why there is none."""
    if estimate.seed_sd is None:
        return SeedsNeeded(None, "spread")
    if (n := seeds_expected(rule, estimate, max_seeds)) is not None:
        return SeedsNeeded(n)
    return SeedsNeeded(None, "too close" if seeds_can_decide(rule, estimate) else "test set")
