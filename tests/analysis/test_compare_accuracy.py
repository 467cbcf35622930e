"""Comparisons of classifiers: intervals, scenarios and what prevents a verdict, from written run folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oelm.analysis.compare import Comparison
from oelm.analysis.verdict import NO_INTERVAL, UNDECIDED
from oelm.runs.folder import RunFolder
from run_factory import analyze, cls_config, write_arm, write_run


def classifiers(root: Path, levels=(0.84, 0.80), examples=1000, predictions=True, seeds=3) -> Comparison:
    rng = np.random.default_rng(1)
    easy = rng.random(examples)
    for (id, arm), level in zip(
        (("GPT-CLS-01", "baseline"), ("GPT-CLS-02", "oelm-freeze")), levels, strict=True
    ):
        for seed in range(seeds):
            hits = (easy + rng.normal(0, 0.02, examples) < level).astype(int)
            folder = write_run(root, cls_config(id, arm, seed=seed), hits=hits)
            if not predictions:
                (folder / "predictions.json").unlink()
                RunFolder(folder).write_checksums()
    (comparison,) = analyze(root).comparisons.of("baseline")
    return comparison


def test_the_accuracy_interval_includes_the_test_set_error(tmp_path):
    c = classifiers(tmp_path)
    a, b = ([100 * x.scores[s] for s in range(3)] for x in (c.arm, c.reference))
    seeds_only = stats.ttest_rel(a, b).confidence_interval(0.95)
    low, high = c.effect.interval
    assert c.test_error == "predictions"
    assert c.effect.test_se > 0
    assert low < seeds_only.low
    assert high > seeds_only.high
    assert c.ratio.exp().value == pytest.approx(stats.gmean(np.divide(a, b)))


def test_missing_predictions_widen_the_interval_and_are_flagged(tmp_path):
    kept = classifiers(tmp_path / "kept")
    lost = classifiers(tmp_path / "lost", predictions=False)
    assert lost.test_error == "binomial"
    assert lost.effect.test_se > kept.effect.test_se
    assert "predictions are missing" in " | ".join(map(str, lost.flags))


@pytest.mark.parametrize(
    ("levels", "examples", "outcome"),
    [
        ((0.80, 0.80), 20_000, "A"),
        ((0.85, 0.75), 20_000, "B"),
        ((0.84, 0.805), 20_000, "C"),
        ((0.84, 0.82), 300, UNDECIDED),
    ],
)
def test_scenarios_of_phase_four(tmp_path, levels, examples, outcome):
    assert classifiers(tmp_path, levels, examples).scenario.outcome == outcome


def test_one_seed_of_a_classifier_gets_no_scenario(tmp_path):
    c = classifiers(tmp_path, seeds=1)
    assert c.effect.interval is None
    assert c.scenario.outcome == NO_INTERVAL


def test_a_trained_arm_has_no_scenario(tmp_path):
    for arm in ("baseline", "orthogonal-init", "oelm-freeze"):
        write_arm(tmp_path, "imdb", arm, [np.arange(400) < 320] * 2, make=cls_config)
    made = analyze(tmp_path).comparisons.of("baseline")
    assert {c.arm.name: c.scenario is not None for c in made} == {
        "orthogonal-init": False,
        "oelm-freeze": True,
    }


def test_a_baseline_at_chance_prevents_a_verdict(tmp_path):
    """Two arms at chance do not differ, but that does not show that freezing costs nothing."""
    c = classifiers(tmp_path, levels=(0.5, 0.5), examples=4000)
    assert c.target.outcome == c.scenario.outcome == UNDECIDED
    assert c.target.reason == "chance"
    assert "no better than" in " | ".join(map(str, c.flags))
