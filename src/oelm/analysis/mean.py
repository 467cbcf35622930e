"""One figure over several datasets: the mean of a study's comparisons, seed by seed.

A seed draws the same frozen rows whatever the text is, so its luck may be shared between datasets. The mean
is therefore taken over the datasets within each seed, and the interval over the seeds; the test sets are
independent. Three seeds can agree by luck: the interval is never narrower than it would be if the seeds of
different datasets were independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from oelm.analysis.compare import Comparison, Comparisons
from oelm.analysis.statistics import LEVEL, Estimate, difference
from oelm.analysis.verdict import ACCURACY_SIGN, ACCURACY_TARGET, PPL_SIGN, PPL_TARGET, Verdict, decide

KINDS = ("baseline", "control", "orthogonality")


@dataclass(frozen=True, eq=False)
class Mean:
    """The same two arms on several datasets of a study."""

    comparisons: tuple[Comparison, ...]
    effect: Estimate
    verdict: Verdict  # on the 5 % target; of orthogonality, whether there is a difference at all

    @property
    def first(self) -> Comparison:
        return self.comparisons[0]


def means(comparisons: Comparisons) -> list[Mean]:
    """Of frozen arms on at least two datasets. Where one of the comparisons is refused, withheld or of
    unpaired seeds there is no mean: one over the rest would be of another question."""
    found: dict[tuple[str, ...], list[Comparison]] = {}
    for c in comparisons.made:
        if c.kind in KINDS and c.arm.freezes and not c.arm.probes:
            config = c.arm.config
            key = (config.study, config.scale, c.kind, c.metric, c.arm.name, c.reference.name)
            found.setdefault(key, []).append(c)
    made = (_mean(group) for group in found.values() if len({c.dataset for c in group}) > 1)
    return [mean for mean in made if mean is not None]


def _mean(group: Sequence[Comparison]) -> Mean | None:
    seeds = set.intersection(*(set(a.scores) for c in group for a in (c.arm, c.reference)))
    if len(seeds) < 2 or any(
        c.effect is None or c.effect.way != "paired t" or c.target.because for c in group
    ):
        return None
    perplexity = group[0].metric == "ppl"
    ratio = _estimate(group, seeds, [c.ratio for c in group if c.ratio], logarithm=True)
    effect = ratio
    if not perplexity:
        effect = _estimate(group, seeds, [c.effect for c in group if c.effect], logarithm=False)
    rules = (PPL_TARGET, PPL_SIGN) if perplexity else (ACCURACY_TARGET, ACCURACY_SIGN)
    return Mean(tuple(group), effect, decide(rules[group[0].kind == "orthogonality"], ratio))


def _estimate(
    group: Sequence[Comparison], seeds: set[int], single: Sequence[Estimate], *, logarithm: bool
) -> Estimate:
    def scale(x: float) -> float:
        return math.log(max(x, 1e-6)) if logarithm else 100 * x  # no classifier is right never

    def over_datasets(side: str) -> dict[int, float]:
        arms = [getattr(c, side) for c in group]
        return {s: sum(scale(a.scores[s]) for a in arms) / len(arms) for s in sorted(seeds)}

    def pooled(errors: Sequence[float]) -> float:
        return math.hypot(*errors) / len(errors)

    degrees = sum(e.n - 1 for e in single)
    upper = 0.5 + LEVEL / 2
    student = float(stats.t.ppf(upper, degrees) / stats.norm.ppf(upper))  # rest_se is taken as known well
    independent = pooled([(e.seed_sd or 0.0) / math.sqrt(e.n) for e in single])
    return difference(
        over_datasets("arm"),
        over_datasets("reference"),
        test_se=pooled([e.test_se for e in single]),
        rest_se=max(student * independent, pooled([e.rest_se for e in single])),
    )
