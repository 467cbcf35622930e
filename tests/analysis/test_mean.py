"""The mean over datasets, checked against scipy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from oelm.analysis.statistics.sequential import level_per_look
from oelm.report.sections.comparisons import mean_table
from oelm.report.translate import Translator
from run_factory import analyze, cls_config, lm_config, write_arm, write_run

BASE = {"tinystories": (8.0, 8.4, 8.2), "wikitext2": (50.0, 52.0, 49.0)}
ARM = {"tinystories": (9.9, 10.2, 10.2), "wikitext2": (60.0, 61.5, 59.5)}  # the datasets agree seed by seed


@pytest.fixture
def corpora(tmp_path):
    for dataset in BASE:
        write_arm(tmp_path, dataset, "baseline", BASE[dataset])
        write_arm(tmp_path, dataset, "oelm-freeze", ARM[dataset])
    return tmp_path


def test_the_mean_is_taken_per_seed_and_the_interval_over_seeds(corpora):
    (mean,) = analyze(corpora).means
    per_seed = [np.mean([math.log(ARM[d][s] / BASE[d][s]) for d in BASE]) for s in range(3)]
    want = stats.ttest_1samp(per_seed, 0.0).confidence_interval(0.95)
    assert mean.effect.value == pytest.approx(np.mean(per_seed))
    assert mean.effect.interval == pytest.approx((want.low, want.high))
    assert mean.verdict.outcome == "missed"
    row = mean_table(analyze(corpora), Translator())[1].rows[0]
    assert row.cells[:3] == ("X, 2 datasets (mini)", "oelm-freeze", "baseline")
    assert analyze(corpora).to_dict()["means"][0]["datasets"] == list(BASE)


def sequential(config):
    return replace(config, compare=replace(config.compare, max_seeds=12))


def test_the_mean_has_the_level_of_the_dataset_with_repeated_looks(tmp_path):
    for dataset, change in (("tinystories", lambda c: c), ("wikitext2", sequential)):
        for arm, values in (("baseline", BASE), ("oelm-freeze", ARM)):
            make = lambda *a, change=change, **k: change(lm_config(*a, **k))  # noqa: E731
            write_arm(tmp_path, dataset, arm, values[dataset], make=make)
    (mean,) = analyze(tmp_path).means
    assert mean.effect.level == level_per_look(12)


def test_there_is_no_mean_over_a_diverged_seed_after_the_last_look_at_the_target(tmp_path):
    changes = (-0.004, 0.004, 0.001, 0.0)  # three seeds meet the target; the sign stays open
    for dataset in BASE:
        for seed, change in enumerate(changes):
            for arm in ("baseline", "oelm-freeze"):
                base = "" if arm == "baseline" else f"X-{dataset}-baseline"
                config = sequential(lm_config(f"X-{dataset}-{arm}", arm, seed=seed))
                config = replace(
                    config,
                    study="X",
                    data=replace(config.data, dataset=dataset),
                    compare=replace(config.compare, group=f"X/{dataset}", baseline=base),
                )
                state = "diverged" if base and seed == 3 else "finished"
                value = 8.0 * math.exp(change if base else 0.0) * (1 + 0.001 * seed)
                write_run(tmp_path, config, value, state=state)
    analysis = analyze(tmp_path)
    assert [c.target.outcome for c in analysis.comparisons.made] == ["met", "met"]
    assert analysis.means == []


def test_seeds_that_agree_by_chance_do_not_give_a_narrow_interval_of_the_mean(tmp_path):
    base, arm = (
        BASE,
        {"tinystories": (8.9, 9.1, 9.2), "wikitext2": (53.0, 58.0, 52.0)},
    )  # deviations cancel
    for dataset in base:
        write_arm(tmp_path, dataset, "baseline", base[dataset])
        write_arm(tmp_path, dataset, "oelm-freeze", arm[dataset])
    (mean,) = analyze(tmp_path).means
    logs = np.array([[math.log(a / b) for a, b in zip(arm[d], base[d], strict=True)] for d in base])
    half = stats.t.ppf(0.975, 4) * math.sqrt(logs.var(axis=1, ddof=1).sum() / 3) / 2
    assert mean.effect.interval == pytest.approx((logs.mean() - half, logs.mean() + half))


def test_the_mean_of_orthogonality_has_a_sign_verdict(corpora):
    for dataset in BASE:
        write_arm(
            corpora,
            dataset,
            "oelm-random-matched",
            [x * (1.001 + i / 1e4) for i, x in enumerate(ARM[dataset])],
        )
    verdicts = {m.first.kind: m.verdict for m in analyze(corpora).means}
    assert (verdicts["orthogonality"].rule, verdicts["baseline"].rule) == ("sign", "target")
    assert verdicts["orthogonality"].outcome == "better"  # 0.1 %, in every seed


def test_generated_tasks_are_not_in_the_mean(corpora):
    before = analyze(corpora).means[0].effect
    write_arm(corpora, "task-copy", "baseline", (6.0, 6.0, 6.1))
    write_arm(corpora, "task-copy", "oelm-freeze", (26.0, 25.0, 27.0))
    assert [m.effect for m in analyze(corpora).means] == [before]


def test_no_mean_with_one_dataset_or_a_missing_verdict(tmp_path, corpora):
    write_arm(corpora, "openwebtext", "baseline", (90.0, 91.0, 92.0))
    write_arm(corpora, "openwebtext", "oelm-freeze", (95.0, 96.0, 97.0), fairness={"steps": 7})
    assert analyze(corpora).means == []
    chance = tmp_path / "chance"
    guess = np.arange(400) % 2  # as good as always predicting one class
    for dataset, right in (("imdb", np.arange(400) < 320), ("sst2", guess)):
        write_arm(chance, dataset, "baseline", [right] * 2, make=cls_config)
        write_arm(chance, dataset, "oelm-freeze", [np.roll(right, 1), right], make=cls_config)
    assert [c.target.reason for c in analyze(chance).comparisons.made] == ["", "chance"]
    assert analyze(chance).means == []
    alone = tmp_path / "alone"
    write_arm(alone, "tinystories", "baseline", BASE["tinystories"])
    write_arm(alone, "tinystories", "oelm-freeze", ARM["tinystories"])
    assert analyze(alone).means == []
    assert mean_table(analyze(alone), Translator()) == []


def test_the_same_methods_in_another_model_are_not_in_one_mean(corpora):
    for arm, values in (("baseline", BASE["tinystories"]), ("oelm-freeze", ARM["tinystories"])):
        write_arm(corpora, "openwebtext", arm, values, pretrained=True)
    (mean,) = analyze(corpora).means
    assert {c.dataset for c in mean.comparisons} == {"tinystories", "wikitext2"}


def test_the_mean_accuracy_includes_the_test_set_errors(tmp_path):
    rng = np.random.default_rng(0)
    for dataset in ("imdb", "sst2"):
        for arm, level in (("baseline", 0.8), ("oelm-freeze", 0.78)):
            hits = [(rng.random(400) < level).astype(int) for _ in range(3)]
            write_arm(tmp_path, dataset, arm, hits, make=cls_config)
    found = analyze(tmp_path)
    (mean,) = found.means
    single = [c.effect for c in found.comparisons.made]
    assert mean.effect.value == pytest.approx(np.mean([e.value for e in single]))
    assert mean.effect.test_se == pytest.approx(math.hypot(*(e.test_se for e in single)) / 2)
    assert mean.effect.interaction_se >= math.hypot(*(e.interaction_se for e in single)) / 2
    low, high = mean.effect.interval
    assert (high - low) / 2 >= 1.9 * mean.effect.interaction_se
