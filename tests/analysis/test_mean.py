"""The mean over datasets, against scipy by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from run_factory import cls_config, lm_config, write_run
from scipy import stats

from oelm.analysis.analyze import analyze
from oelm.analysis.findings import mean_blocks
from oelm.analysis.words import Words

BASE = {"tinystories": (8.0, 8.4, 8.2), "wikitext2": (50.0, 52.0, 49.0)}
ARM = {"tinystories": (8.9, 9.1, 9.2), "wikitext2": (53.0, 58.0, 52.0)}


def write(root, dataset, arm, values, *, task=lm_config, **changes):
    base = "" if arm == "baseline" else f"X-{dataset}-baseline"
    for seed, value in enumerate(values):
        config = task(f"X-{dataset}-{arm}", arm, seed=seed)
        config = replace(
            config,
            data=replace(config.data, dataset=dataset),
            compare=replace(config.compare, group=f"X/{dataset}", baseline=base),
        )
        hits = value if isinstance(value, np.ndarray) else None
        write_run(root, config, 0.0 if hits is not None else value, hits=hits, **changes)


@pytest.fixture
def corpora(tmp_path):
    for dataset in BASE:
        write(tmp_path, dataset, "baseline", BASE[dataset])
        write(tmp_path, dataset, "oelm-freeze", ARM[dataset])
    return tmp_path


def test_the_mean_is_taken_within_a_seed_and_its_interval_over_seeds(corpora):
    (mean,) = analyze(corpora).means
    per_seed = [np.mean([math.log(ARM[d][s] / BASE[d][s]) for d in BASE]) for s in range(3)]
    want = stats.ttest_1samp(per_seed, 0.0).confidence_interval(0.95)
    assert mean.effect.value == pytest.approx(np.mean(per_seed))
    assert mean.effect.interval == pytest.approx((want.low, want.high))
    assert mean.target.outcome == "fails"
    row = mean_blocks(analyze(corpora), Words("en"))[1].rows[0]
    assert row.cells[:3] == ("paper, 2 datasets (mini)", "oelm-freeze", "baseline")
    assert analyze(corpora).to_dict()["means"][0]["datasets"] == list(BASE)


def test_a_generated_task_is_not_among_them(corpora):
    before = analyze(corpora).means[0].effect
    write(corpora, "task-copy", "baseline", (6.0, 6.0, 6.1))
    write(corpora, "task-copy", "oelm-freeze", (26.0, 25.0, 27.0))
    assert [m.effect for m in analyze(corpora).means] == [before]


def test_one_dataset_or_one_that_is_withheld_makes_no_mean(tmp_path, corpora):
    write(corpora, "openwebtext", "baseline", (90.0, 91.0, 92.0))
    write(corpora, "openwebtext", "oelm-freeze", (95.0, 96.0, 97.0), fairness={"steps": 7})
    assert analyze(corpora).means == []
    alone = tmp_path / "alone"
    write(alone, "tinystories", "baseline", BASE["tinystories"])
    write(alone, "tinystories", "oelm-freeze", ARM["tinystories"])
    assert analyze(alone).means == []
    assert mean_blocks(analyze(alone), Words("en")) == []


def test_test_sets_count_for_accuracy(tmp_path):
    rng = np.random.default_rng(0)
    for dataset in ("imdb", "sst2"):
        for arm, level in (("baseline", 0.8), ("oelm-freeze", 0.78)):
            hits = [(rng.random(400) < level).astype(int) for _ in range(3)]
            write(tmp_path, dataset, arm, hits, task=cls_config)
    found = analyze(tmp_path)
    (mean,) = found.means
    single = [c.effect for c in found.comparisons.made]
    assert mean.effect.value == pytest.approx(np.mean([e.value for e in single]))
    assert mean.effect.test_se == pytest.approx(math.hypot(*(e.test_se for e in single)) / 2)
    assert mean.effect.rest_se == pytest.approx(math.hypot(*(e.rest_se for e in single)) / 2)
    low, high = mean.effect.interval
    assert (high - low) / 2 >= 1.9 * mean.effect.rest_se
