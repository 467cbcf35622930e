"""Comparisons, their intervals and verdicts, from synthetic run folders."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oelm.analysis.compare import Comparison, compare
from oelm.analysis.statistics.sequential import level_per_look
from oelm.analysis.verdict import EQUIVALENT, MET, MISSED, NO_INTERVAL, UNDECIDED
from oelm.config.run_config import CompareConfig
from oelm.experiments.catalogue import reported_with
from oelm.report.sections.comparisons import goal_table
from oelm.report.sentences import conclusion, sentences
from oelm.report.translate import Translator
from oelm.runs.folder import RunFolder
from run_factory import (
    BASE_PPL,
    FROZEN_PPL,
    analyze,
    cls_config,
    dump,
    lm_config,
    pair,
    texts,
    write_run,
    write_study,
)


def test_perplexity_ratio_is_paired_on_the_log_scale(tmp_path):
    c = pair(tmp_path)
    oracle = stats.ttest_rel(np.log(FROZEN_PPL), np.log(BASE_PPL))
    low, high = oracle.confidence_interval(0.95)
    assert c.ratio.exp().value == pytest.approx(stats.gmean(np.divide(FROZEN_PPL, BASE_PPL)))
    assert c.ratio.exp().interval == pytest.approx((math.exp(low), math.exp(high)))
    assert (c.flags, c.refused) == ((), ())


def test_target_verdicts(tmp_path):
    assert pair(tmp_path / "a", arm=(8.01, 8.12, 8.20)).target.outcome == MET
    assert pair(tmp_path / "b", arm=(9.0, 9.1, 9.2)).target.outcome == MISSED
    assert pair(tmp_path / "c").target.outcome == UNDECIDED


def test_arms_that_differ_by_less_than_one_percent_are_equivalent(tmp_path):
    c = pair(tmp_path, arm=(8.01, 8.09, 8.21))
    assert (c.sign.outcome, c.target.outcome) == (EQUIVALENT, MET)
    assert str(conclusion(c)) == "oelm-freeze and baseline differ by less than 1 %."


def test_a_sequential_study_uses_a_stricter_level(tmp_path):
    found, level = pair(tmp_path), level_per_look(20)
    c = compare("baseline", found.arm, found.reference, max_seeds=20)
    oracle = stats.ttest_rel(np.log(FROZEN_PPL), np.log(BASE_PPL)).confidence_interval(level)
    assert c.ratio.interval == pytest.approx(tuple(oracle))
    assert c.ratio.level == level


def test_one_seed_gives_numbers_but_no_verdict(tmp_path):
    c = pair(tmp_path, arm=(9.9,), base=(8.0,))
    assert c.target.outcome == NO_INTERVAL
    assert "only one seed" in texts(c.flags)


def test_the_control_of_a_study_without_a_plain_baseline_is_not_called_a_baseline(tmp_path):
    for seed, value in enumerate(BASE_PPL):
        for id, arm in (("LONG-CONTROL", "trained-plus"), ("LONG-PLUS", "oelm-plus")):
            named = "" if arm == "trained-plus" else "LONG-CONTROL"
            compared = CompareConfig("longer", arm, baseline=named, control=named)
            write_run(tmp_path, lm_config(id, arm, seed=seed, compare=compared), value)
    assert [c.kind for c in analyze(tmp_path).comparisons.made] == ["control"]


def test_identical_predictions_are_undecided(tmp_path):
    """An interval of width 0 does not mean a precise estimate."""
    hits = (np.random.default_rng(0).random(200) < 0.8).astype(int)
    for seed in range(3):
        write_run(tmp_path, cls_config(seed=seed), hits=hits)
        write_run(tmp_path, cls_config("GPT-CLS-02", "oelm-freeze", seed=seed), hits=hits)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert (c.target.outcome, c.target.reason) == (UNDECIDED, "identical")
    said = " ".join(map(str, sentences(c)))
    assert "the same result for every seed" in said
    assert "0.00 to" not in said
    assert "possible" not in said


def test_copies_of_one_run_get_no_verdict(tmp_path):
    """The interval covers the choice of test rows, so it is not empty although all seeds are the same."""
    easy = np.random.default_rng(0).random(1000)
    for seed in range(3):
        write_run(tmp_path, cls_config(seed=seed), hits=(easy < 0.85).astype(int))
        write_run(tmp_path, cls_config("GPT-CLS-02", "oelm-freeze", seed=seed), hits=(easy < 0.7).astype(int))
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert c.effect.test_se > 0
    assert (c.target.outcome, c.target.reason) == (UNDECIDED, "no variation")
    assert "all 3 seeds of GPT-CLS-02 have exactly the same result" in texts(c.flags)


def test_a_very_wide_interval_is_called_uninformative(tmp_path):
    rng = np.random.default_rng(0)
    for seed, level in enumerate((0.3, 0.9)):
        hits = [(rng.random(400) < x).astype(int) for x in (0.7, level)]
        write_run(tmp_path, cls_config(seed=seed), hits=hits[0])
        write_run(tmp_path, cls_config("GPT-CLS-02", "oelm-freeze", seed=seed), hits=hits[1])
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    said = " ".join(map(str, sentences(c)))
    assert "(95 % confidence interval: too wide to be informative; n = 2)" in said
    assert "with n = 2 seeds the interval is too wide to be informative; run more seeds" in said
    assert str(conclusion(c)) == "oelm-freeze and baseline: no conclusion is possible yet."


def test_the_report_of_a_phase_has_only_its_runs(tmp_path):
    write_study(tmp_path)
    analysis = analyze(tmp_path, ["paper"], ids=reported_with(["3"]))
    assert {arm.id for arm in analysis.arms} == {"GPT-01", "GPT-02", "GPT-03"}
    assert "GPT-07" in analysis.never_started
    assert "XNLI-01" not in analysis.never_started


def test_a_comparison_waits_for_its_baseline(tmp_path):
    write_run(tmp_path, lm_config("GPT-02", "oelm-freeze"), 8.5)
    analysis = analyze(tmp_path)
    assert analysis.comparisons.made == ()
    assert "waiting for finished runs of GPT-01" in texts(analysis.comparisons.waiting)


def test_orthogonality_control_and_baseline_are_separate_comparisons(tmp_path):
    made = analyze(write_study(tmp_path)).comparisons
    (orthogonality,) = made.of("orthogonality")
    assert (orthogonality.arm.name, orthogonality.reference.name) == ("oelm-freeze", "oelm-random-matched")
    assert orthogonality.sign.outcome == UNDECIDED
    assert {c.arm.name: c.reference.name for c in made.of("control")}["oelm-plus"] == "orthogonal-init"
    # frozen N(0, 0.02) also has another scale, so it is not the reference
    assert all(c.reference.name != "oelm-random" for c in made.of("orthogonality"))


def language_models(root: Path, *, documents: int = 100, effect_sd: float = 0.1) -> list[Path]:
    """Three seeds of two arms on the same documents, whose difference varies between documents."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(50, 400, documents)
    level, effect = rng.normal(2.0, 0.3, documents), rng.normal(0.05, effect_sd, documents)
    folders = []
    for id, arm in (("GPT-01", "baseline"), ("GPT-02", "oelm-freeze")):
        for seed in range(3):
            per_token = level + (arm != "baseline") * effect + 0.002 * seed
            losses = tokens * per_token + rng.normal(0, 1, documents)
            config = lm_config(id, arm, seed=seed)
            folders.append(write_run(root, config, documents=(tokens, losses)))
    return folders


def only_baseline(root: Path) -> Comparison:
    (comparison,) = analyze(root).comparisons.of("baseline")
    return comparison


def test_the_perplexity_interval_includes_the_choice_of_test_text(tmp_path):
    language_models(tmp_path)
    c = only_baseline(tmp_path)
    a, b = ([np.log(x.scores[s]) for s in range(3)] for x in (c.arm, c.reference))
    seeds_only = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert c.test_error == "documents"
    assert c.effect.value == pytest.approx(np.mean(np.subtract(a, b)))
    assert c.effect.test_se == pytest.approx(0.1 / np.sqrt(100), rel=0.4)  # documents differ in length
    assert c.effect.interval[0] < seeds_only.low
    assert c.effect.interval[1] > seeds_only.high


@pytest.mark.parametrize("problem", ["missing", "other documents", "wrong sum"])
def test_losses_per_document_are_used_only_if_they_are_complete_and_equal(tmp_path, problem):
    folder = language_models(tmp_path)[-1]
    stored = RunFolder(folder).test_losses()
    if problem == "missing":
        (folder / "test_losses.json").unlink()
        RunFolder(folder).write_checksums()
    else:
        tokens, losses = list(stored.tokens), list(stored.losses)
        tokens[0], tokens[1] = tokens[0] + 1, tokens[1] - 1
        losses[0] += 500.0 if problem == "wrong sum" else 0.0
        dump(folder / "test_losses.json", {"tokens": tokens, "losses": losses})
    c = only_baseline(tmp_path)
    assert c.test_error == "none"
    assert c.effect.test_se == 0.0
    assert any("test_losses.json" in str(w) for w in analyze(tmp_path).warnings) == (problem == "wrong sum")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"family": "gpt", "name": "mini", "causal": True}, "decoder"),
        ({"family": "gpt", "name": "mini", "causal": False}, "encoder"),
        ({"family": "hf", "name": "bert-base-uncased"}, "encoder"),
        ({"family": "hf", "name": "minilm"}, "encoder"),
        ({"family": "hf", "name": "tiny-bart"}, "encoder-decoder"),
        ({"family": "hf", "name": "t5-small"}, "encoder-decoder"),
        ({"family": "hf", "name": "gpt2"}, "decoder"),
        ({"family": "hf", "name": "/home/bart/gpt2"}, "decoder"),
        ({"family": "hf", "name": "/opt/xlm"}, "other"),
    ],
)
def test_architectures(tmp_path, model, kind):
    config = lm_config()
    write_run(tmp_path, replace(config, model=replace(config.model, **model)))
    (arm,) = analyze(tmp_path).arms
    assert arm.architecture == kind


def goal_cells(
    root: Path, plus: float, control: float, bias: float, init: float, rope: float, plain: float
) -> list[str]:
    """The cells of the frozen arm in the table of goals; seeds differ by about 0.1 %."""
    rotary = replace(lm_config().model, position="rope")

    def write(id: str, arm: str, value: float, model, baseline: str, control: str = "") -> None:
        for seed in range(4):
            config = lm_config(id, arm, seed=seed)
            compare = replace(config.compare, baseline=baseline, control=control)
            noise = np.random.default_rng([seed, *id.encode()]).normal(scale=1e-3)
            write_run(root, replace(config, model=model, compare=compare), value * (1 + noise))

    write("GPT-01", "baseline", plain, lm_config().model, "")
    write("R-BASE", "baseline", rope, rotary, "GPT-01")
    write("R-BIAS", "baseline-bias", bias, rotary, "R-BASE")
    write("R-INIT", "orthogonal-init", init, rotary, "R-BASE")
    write("R-CONTROL", "trained-plus", control, rotary, "R-BASE")
    write("R-PLUS", "oelm-plus", plus, rotary, "R-BASE", "R-CONTROL")
    found = analyze(root)
    kinds = {c.kind for c in found.comparisons.made if c.arm.id == "R-PLUS"}
    assert kinds == {"baseline", "control", "bias", "init", "plain"}
    table = goal_table(found, Translator())[1]
    (row,) = table.rows
    return ["".join(getattr(part, "text", part) for part in cell) for cell in row.cells]


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((8.0, 8.0, 8.0, 8.2, 8.3, 9.0), "reached"),
        ((8.0, 7.8, 8.0, 8.2, 8.3, 9.0), "missed"),  # 2.5 % worse than its control
        ((8.0, 8.0, 7.8, 8.2, 8.3, 9.0), "missed"),  # 2.5 % worse than the trained baseline with biases
        ((8.0, 8.0, 8.0, 7.9, 8.3, 9.0), "missed"),  # worse than the trained init without extras
        ((8.0, 8.0, 8.0, 8.2, 8.3, 7.9), "missed"),  # worse than the plain architecture
        ((8.0, 8.0, 8.0, 8.0, 8.3, 9.0), "undecided"),  # equal to the trained init
    ],
)
def test_the_goal_is_met_only_if_every_interval_says_so(tmp_path, values, verdict):
    cells = goal_cells(tmp_path, *values)
    assert cells[3] == verdict
    assert len(cells) == 9


def test_a_goal_needs_every_comparison_and_no_diverged_seed(tmp_path):
    values = (8.0, 8.0, 8.0, 8.2, 8.3, 9.0)
    goal_cells(tmp_path / "a", *values)
    for folder in (tmp_path / "a").rglob("R-INIT"):
        shutil.rmtree(folder)
    (goal,) = analyze(tmp_path / "a").goals
    assert (goal.outcome, goal.missing) == (UNDECIDED, ("init",))
    goal_cells(tmp_path / "b", *values)
    rotary = replace(lm_config().model, position="rope")
    bad = lm_config("R-CONTROL", "trained-plus", seed=9)
    bad = replace(bad, model=rotary, compare=replace(bad.compare, baseline="R-BASE"))
    write_run(tmp_path / "b", bad, state="diverged")
    (goal,) = analyze(tmp_path / "b").goals
    assert goal.outcome == UNDECIDED
    assert analyze(tmp_path / "b").to_dict()["nothing_lost"][0]["outcome"] == UNDECIDED


def test_a_language_model_without_a_control_has_no_goal(tmp_path):
    pair(tmp_path)
    assert goal_table(analyze(tmp_path), Translator()) == []
