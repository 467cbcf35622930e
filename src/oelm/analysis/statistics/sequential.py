"""Confidence levels for a study that checks its results after every seed and stops at a verdict.

A 95 % confidence interval that is checked after each of the seeds 3, 4, ..., 20 excludes the true difference
at one or more checks in about 23 % of studies. Group-sequential designs (Pocock 1977) use the same stricter
level at every check, chosen so that the probability of an error at one or more checks is 5 %. The intervals
at that level are repeated confidence intervals (Jennison and Turnbull 1989): with probability 95 % all of
them contain the true difference. They stay valid whenever and for whatever reason the study stops, and for
any number of margins.

The level depends only on the maximum number of seeds, because the t statistics have the same joint
distribution for every mean and spread. The table assumes normally distributed differences. In simulations
with other distributions, the probability of an error at any check is 3 % for heavy tails (t with 3 degrees
of freedom) and 8 % for uniform differences.
"""

from __future__ import annotations

MIN_SEEDS = 3  # number of seeds at the first check

# LEVELS[i] is the two-sided error probability of each check if the last check is at MIN_SEEDS + i seeds. The
# values are simulated; they are about 1 % (relative) too small, so that the intervals are slightly too wide.
# tests/analysis/test_sequential.py repeats the simulation.
LEVELS = (
    0.05000, 0.03030, 0.02268, 0.01860, 0.01600, 0.01419, 0.01290, 0.01192, 0.01112, 0.01048,
    0.00993, 0.00947, 0.00907, 0.00872, 0.00840, 0.00813, 0.00789, 0.00768, 0.00748, 0.00730,
    0.00714, 0.00697, 0.00684, 0.00670, 0.00658, 0.00647, 0.00636, 0.00625, 0.00616, 0.00607,
    0.00598, 0.00590, 0.00583, 0.00575, 0.00568, 0.00561, 0.00554, 0.00548, 0.00542, 0.00537,
    0.00531, 0.00526, 0.00521, 0.00517, 0.00512, 0.00507, 0.00503, 0.00499,
)  # fmt: skip
MAX_SEEDS = MIN_SEEDS + len(LEVELS) - 1


def level_per_look(max_seeds: int) -> float:
    """Return the confidence level of each check, so that all checks together have a confidence of 95 %.

    max_seeds: number of seeds at the last check; the checks are at 3, 4, ..., `max_seeds` seeds

    >>> from oelm.analysis.statistics.intervals import difference
    >>> scores, reference = {0: 2.10, 1: 2.14, 2: 2.09}, {0: 2.00, 1: 2.02, 2: 2.01}
    >>> low, high = difference(scores, reference, level=level_per_look(20)).interval
    >>> round(low, 2), round(high, 2)
    (-0.03, 0.23)
    """
    if not MIN_SEEDS <= max_seeds <= MAX_SEEDS:
        raise ValueError(f"max_seeds must be between {MIN_SEEDS} and {MAX_SEEDS}, not {max_seeds}")
    return 1 - LEVELS[max_seeds - MIN_SEEDS]
