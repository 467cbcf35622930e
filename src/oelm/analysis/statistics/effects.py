"""Measure the difference between two arms: a ratio of perplexity, or points of accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from oelm.analysis.arms import Arm
from oelm.analysis.statistics.intervals import (
    LEVEL,
    Estimate,
    binomial_se,
    difference,
    example_se,
    few_documents_factor,
    interaction_se,
    loss_block,
)

TestError = Literal["predictions", "documents", "binomial", "none"]


@dataclass(frozen=True)
class Effects:
    """The difference between two arms on two scales.

    Tables show `effect`. Verdicts use `ratio`, except those of the rule "scenario", which use `effect`.
    """

    effect: Estimate  # log ratio of perplexity, or points of accuracy
    ratio: Estimate  # log ratio of perplexity or accuracy
    test_error: TestError = "none"  # data from which the sampling error of the test set was estimated


def measure(arm: Arm, reference: Arm, level: float = LEVEL) -> Effects:
    """Return the difference between two arms, which must have finished runs and the same metric."""
    if arm.metric == "ppl":
        return _measure_perplexity(arm, reference, level)
    return _measure_accuracy(arm, reference, level)


def _measure_perplexity(arm: Arm, reference: Arm, level: float) -> Effects:
    """Return the difference between two arms in log perplexity.

    The confidence interval includes the sampling error of the finite test set, estimated from the loss of
    each document. If a run has no losses per document (`test_losses.json`), the interval does not include
    this error.
    """
    logs = [{seed: math.log(ppl) for seed, ppl in a.scores.items()} for a in (arm, reference)]
    ratio = difference(*logs, level=level)
    seeds_a, seeds_b = _used_seeds(arm, reference, ratio)
    a, b = _test_losses(arm, seeds_a), _test_losses(reference, seeds_b)
    if a is None or b is None or not np.array_equal(a[0], b[0]):
        return Effects(ratio, ratio)
    tokens = a[0]
    paired = ratio.interval_kind != "Welch" and seeds_a == seeds_b
    if paired:
        blocks: tuple[np.ndarray, ...] = (loss_block(a[1] - b[1], tokens),)
    else:
        blocks = loss_block(a[1], tokens), -loss_block(b[1], tokens)
    test_se = few_documents_factor(tokens, level) * example_se(*blocks)
    ratio = difference(*logs, test_se=test_se, interaction_se=interaction_se(*blocks), level=level)
    return Effects(ratio, ratio, "documents")


def _measure_accuracy(arm: Arm, reference: Arm, level: float) -> Effects:
    # An accuracy of 0 is replaced by that of half a correct answer, because the logarithm of 0 is infinite.
    floor = 0.5 / max(1, *(r.test_n for r in arm.results))
    points = [{seed: 100 * x for seed, x in a.scores.items()} for a in (arm, reference)]
    logs = [{seed: math.log(max(x, floor)) for seed, x in a.scores.items()} for a in (arm, reference)]
    seeds_only = difference(*points, level=level)
    seeds_a, seeds_b = _used_seeds(arm, reference, seeds_only)
    a, b = _hits(arm, seeds_a), _hits(reference, seeds_b)
    if a is not None and b is not None and a.shape[1] == b.shape[1]:
        paired = seeds_only.interval_kind != "Welch" and seeds_a == seeds_b
        scales = _log_scales(a.mean(), b.mean(), floor)
        errors, log_errors = _errors(a, b, (100, 100), paired), _errors(a, b, scales, paired)
        source: TestError = "predictions"
    elif examples := min(r.test_n for r in (*arm.results, *reference.results)):
        means = arm.mean, reference.mean
        errors = binomial_se(*means, examples, (100, 100)), 0.0
        log_errors = binomial_se(*means, examples, _log_scales(*means, floor)), 0.0
        source = "binomial"
    else:
        errors, log_errors, source = (0.0, 0.0), (0.0, 0.0), "none"
    effect = difference(*points, test_se=errors[0], interaction_se=errors[1], level=level)
    ratio = difference(*logs, test_se=log_errors[0], interaction_se=log_errors[1], level=level)
    return Effects(effect, ratio, source)


def _log_scales(accuracy: float, reference: float, floor: float) -> tuple[float, float]:
    """Return 1 / accuracy of both arms, the factor from errors of accuracy to errors of log accuracy."""
    return 1 / max(float(accuracy), floor), 1 / max(float(reference), floor)


def _errors(a: np.ndarray, b: np.ndarray, scales: tuple[float, float], paired: bool) -> tuple[float, float]:
    """Return `example_se()` and `interaction_se()` of the difference between two (seeds, examples) arrays.

    scales: factors by which the two arrays are multiplied first
    """
    a, b = scales[0] * a, scales[1] * b
    blocks = (a - b,) if paired else (a, -b)
    return example_se(*blocks), interaction_se(*blocks)


def _used_seeds(arm: Arm, reference: Arm, estimate: Estimate) -> tuple[list[int], list[int]]:
    """Return (seeds of the arm, seeds of the reference) that `difference()` used to compute `estimate`."""
    shared = sorted(arm.scores.keys() & reference.scores.keys())
    if estimate.interval_kind == "Welch" or not shared:
        return sorted(arm.scores), sorted(reference.scores)
    return shared, shared


def _hits(arm: Arm, seeds: Iterable[int]) -> np.ndarray | None:
    """Return a (seeds, examples) array with 1 for a correct prediction; None if predictions are missing."""
    chosen = set(seeds)
    rows = [r.hits for r in arm.finished if r.seed in chosen]
    if any(h is None for h in rows) or len({len(h) for h in rows if h is not None}) != 1:
        return None
    return np.stack([h for h in rows if h is not None])


def _test_losses(arm: Arm, seeds: Iterable[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the number of tokens of each test document, and its summed loss as a (seeds, documents) array.

    Returns None if a run has no losses per document, or if the runs have different documents.
    """
    chosen = set(seeds)
    rows = [r.test_losses for r in arm.finished if r.seed in chosen]
    held = [row for row in rows if row is not None]
    if len(held) < len(rows) or not all(np.array_equal(tokens, held[0][0]) for tokens, _ in held):
        return None
    return held[0][0], np.stack([losses for _, losses in held])
