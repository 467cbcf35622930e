"""The measured difference between two arms: perplexity ratio, or points of accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from oelm.analysis.arms import Arm
from oelm.analysis.statistics import (
    LEVEL,
    Estimate,
    binomial_se,
    difference,
    example_se,
    interaction_se,
    mcnemar,
)

TestError = Literal["predictions", "binomial", "none"]


@dataclass(frozen=True)
class Effects:
    """A difference on the scale that is shown and on the log scale that the rules use."""

    effect: Estimate  # log ratio of perplexity, or points of accuracy
    ratio: Estimate  # log ratio of perplexity or accuracy
    test_error: TestError = "none"  # the source of the test-set error
    mcnemar_p: float | None = None  # p-value of equal accuracy on the test set, with one seed per arm


def measure(arm: Arm, reference: Arm, level: float = LEVEL) -> Effects:
    """The difference between two arms with the same metric and finished runs."""
    if arm.metric == "ppl":
        return _measure_perplexity(arm, reference, level)
    return _measure_accuracy(arm, reference, level)


def _measure_perplexity(arm: Arm, reference: Arm, level: float) -> Effects:
    """Without a test-set error: run folders have no loss per document."""
    logs = [{seed: math.log(ppl) for seed, ppl in a.scores.items()} for a in (arm, reference)]
    ratio = difference(*logs, level=level)
    return Effects(ratio, ratio)


def _measure_accuracy(arm: Arm, reference: Arm, level: float) -> Effects:
    points = [{seed: 100 * x for seed, x in a.scores.items()} for a in (arm, reference)]
    examples = min(r.test_n for r in (*arm.results, *reference.results))
    floor = 0.5 / max(
        1, *(r.test_n for r in arm.results)
    )  # half an example: the log of accuracy 0 is infinite
    logs = [{seed: math.log(max(x, floor)) for seed, x in a.scores.items()} for a in (arm, reference)]
    seeds_only = difference(*points, level=level)
    seeds = _used_seeds(arm, reference, seeds_only)
    a, b = _hits(arm, seeds[0]), _hits(reference, seeds[1])
    if a is not None and b is not None and a.shape[1] == b.shape[1]:
        paired = seeds_only.interval_kind != "Welch" and seeds[0] == seeds[1]
        blocks = (a - b,) if paired else (a, -b)
        # d log(accuracy) = d accuracy / accuracy, for each example
        a_log, b_log = a / max(float(a.mean()), floor), b / max(float(b.mean()), floor)
        log_blocks = (a_log - b_log,) if paired else (a_log, -b_log)
        test_se, seed_se = 100 * example_se(*blocks), 100 * interaction_se(*blocks)
        log_test_se, log_seed_se = example_se(*log_blocks), interaction_se(*log_blocks)
        return Effects(
            difference(*points, test_se=test_se, interaction_se=seed_se, level=level),
            difference(*logs, test_se=log_test_se, interaction_se=log_seed_se, level=level),
            "predictions",
            mcnemar(a[0], b[0]) if len(a) == len(b) == 1 else None,
        )
    if examples == 0:
        return Effects(seeds_only, difference(*logs, level=level))
    mean_a, mean_b = arm.mean, reference.mean
    log_test_se = math.hypot(
        math.sqrt(mean_a * (1 - mean_a) / examples) / max(mean_a, floor),
        math.sqrt(mean_b * (1 - mean_b) / examples) / max(mean_b, floor),
    )
    return Effects(
        difference(*points, test_se=100 * binomial_se(mean_a, mean_b, examples), level=level),
        difference(*logs, test_se=log_test_se, level=level),
        "binomial",
    )


def _used_seeds(arm: Arm, reference: Arm, estimate: Estimate) -> tuple[list[int], list[int]]:
    """The seeds of each arm that `difference` used."""
    shared = sorted(arm.scores.keys() & reference.scores.keys())
    if estimate.interval_kind == "Welch" or not shared:
        return sorted(arm.scores), sorted(reference.scores)
    return shared, shared


def _hits(arm: Arm, seeds: Iterable[int]) -> np.ndarray | None:
    """(seeds, examples) array, 1 for a correct prediction; None if predictions are missing or incomplete."""
    chosen = set(seeds)
    rows = [r.hits for r in arm.finished if r.seed in chosen]
    if any(h is None for h in rows) or len({len(h) for h in rows if h is not None}) != 1:
        return None
    return np.stack([h for h in rows if h is not None])
