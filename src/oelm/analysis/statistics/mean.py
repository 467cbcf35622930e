"""Compute the mean difference between two arms over several datasets of a study.

The same seed gives the same frozen matrices on every dataset, so the results of one seed may be correlated
between datasets. Therefore the mean over datasets is computed for each seed, and the confidence interval is
computed from these means. The sampling errors of different test sets are independent. With few seeds, the
spread of the means can be small by chance. So the interval is never narrower than an interval that assumes
independent results on all datasets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oelm.analysis.compare import Comparison, Comparisons
from oelm.analysis.fairness.guards import undecidable
from oelm.analysis.statistics.intervals import Estimate, difference, t_quantile, z_quantile
from oelm.analysis.verdict import ACCURACY_SIGN, ACCURACY_TARGET, PPL_SIGN, PPL_TARGET, Verdict, decide

KINDS = ("baseline", "control", "bias", "orthogonality")


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean difference between the same two methods over several datasets of a study."""

    comparisons: tuple[Comparison, ...]  # one per dataset
    effect: Estimate
    verdict: Verdict  # rule "target" (5 %); for comparisons of kind "orthogonality", rule "sign"

    @property
    def first(self) -> Comparison:
        return self.comparisons[0]


def means(comparisons: Comparisons) -> list[Mean]:
    """Return the means over datasets of all frozen arms that were compared on at least two datasets.

    There is no mean if the comparison on one dataset is refused, must not get a verdict or has unpaired
    seeds, because a mean over only the other datasets would answer a different question. Nor is there one if
    a dataset occurs twice, because its test rows would count as two independent samples.
    """
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for c in comparisons.made:
        if c.kind in KINDS and c.arm.freezes and not c.arm.probes:
            config = c.arm.config
            names = (config.study, config.scale, c.kind, c.metric, c.arm.name, c.reference.name)
            # A study may compare the same methods in several models, such as BERT and a GPT classifier.
            key = (*names, config.task, config.model)
            groups.setdefault(key, []).append(c)
    found = (_mean(group) for group in groups.values() if len(group) == len({c.dataset for c in group}) > 1)
    return [mean for mean in found if mean is not None]


def _mean(group: Sequence[Comparison]) -> Mean | None:
    if not all(_has_paired_verdict(c) for c in group):
        return None
    seeds = set.intersection(*(set(a.scores) for c in group for a in (c.arm, c.reference)))
    if len(seeds) < 2:
        return None
    ratio = _estimate(group, seeds, [c.ratio for c in group if c.ratio], logarithm=True)
    if group[0].metric == "ppl":
        effect, target, sign = ratio, PPL_TARGET, PPL_SIGN
    else:
        effect = _estimate(group, seeds, [c.effect for c in group if c.effect], logarithm=False)
        target, sign = ACCURACY_TARGET, ACCURACY_SIGN
    rule = sign if group[0].kind == "orthogonality" else target
    return Mean(tuple(group), effect, decide(rule, ratio))


def _has_paired_verdict(c: Comparison) -> bool:
    if c.effect is None or c.target.reason or undecidable(c.arm, c.reference):
        return False
    return c.effect.interval_kind == "paired t"


def _estimate(
    group: Sequence[Comparison], seeds: set[int], single: Sequence[Estimate], *, logarithm: bool
) -> Estimate:
    """Return the estimated difference between two methods, averaged over datasets for each seed.

    group: the comparison of the two methods on each dataset
    single: the estimated difference on each dataset
    logarithm: compare the logarithm of the scores; otherwise percentage points
    """

    def scale(score: float) -> float:
        return math.log(max(score, 1e-6)) if logarithm else 100 * score  # log(0) is infinite

    def over_datasets(side: str) -> dict[int, float]:
        arms = [getattr(c, side) for c in group]
        return {s: sum(scale(a.scores[s]) for a in arms) / len(arms) for s in sorted(seeds)}

    def pooled(errors: Sequence[float]) -> float:
        return math.hypot(*errors) / len(errors)

    # `difference()` multiplies `interaction_se` by the normal quantile z. This standard error comes from few
    # seeds and needs the t quantile, hence the factor t / z.
    df = sum(e.n - 1 for e in single)
    independent_se = pooled([(e.seed_sd or 0.0) / math.sqrt(e.n) for e in single])
    level = max(e.level for e in single)  # a dataset with repeated looks needs the wider interval
    independent_se *= t_quantile(level, df) / z_quantile(level)
    return difference(
        over_datasets("arm"),
        over_datasets("reference"),
        test_se=pooled([e.test_se for e in single]),
        interaction_se=max(independent_se, pooled([e.interaction_se for e in single])),
        level=level,
    )
