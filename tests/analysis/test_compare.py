"""Comparisons, refusals, caveats and flags, from synthetic run folders."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oelm.analysis.compare import Comparison
from oelm.analysis.statistics.sequential import level_per_look
from oelm.analysis.verdict import EQUIVALENT, MET, MISSED, NO_INTERVAL, REFUSED, UNDECIDED, WITHHELD
from oelm.config.run_config import CompareConfig, QuestionConfig, TuneConfig
from oelm.experiments.catalogue import reported_with
from oelm.methods.presets import find_method
from oelm.report.document import plain
from oelm.report.sections.comparisons import goal_table
from oelm.report.sentences import conclusion, sentences
from oelm.report.summary import cards, headline
from oelm.report.translate import Translator
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.schema import PrecisionFacts
from run_factory import analyze, cls_config, dump, lm_config, write_arm, write_run, write_study, write_trials

A, B = (8.5, 8.8, 8.6), (8.0, 8.1, 8.2)


def pair(root: Path, arm=A, base=B, *, change=lambda c: c, **options) -> Comparison:
    """Three seeds of a frozen arm and its baseline; `change` alters the arm's config."""
    for seed, value in enumerate(base):
        write_run(root, lm_config(seed=seed), value)
    for seed, value in enumerate(arm):
        write_run(root, change(lm_config("GPT-02", "oelm-freeze", seed=seed)), value, **options)
    write_trials(root, lm_config(seed=0))
    write_trials(root, change(lm_config("GPT-02", "oelm-freeze", seed=0)))
    (comparison,) = analyze(root).comparisons.of("baseline")
    return comparison


def texts(messages) -> str:
    return " | ".join(map(str, messages))


def test_perplexity_ratio_is_paired_on_the_log_scale(tmp_path):
    c = pair(tmp_path)
    oracle = stats.ttest_rel(np.log(A), np.log(B))
    low, high = oracle.confidence_interval(0.95)
    assert c.ratio.exp().value == pytest.approx(stats.gmean(np.divide(A, B)))
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
    pair(tmp_path)
    level = level_per_look(20)
    (c,) = analyze(tmp_path, level=level).comparisons.of("baseline")
    oracle = stats.ttest_rel(np.log(A), np.log(B)).confidence_interval(level)
    assert c.ratio.interval == pytest.approx(tuple(oracle))
    assert c.ratio.level == level


def test_one_seed_gives_numbers_but_no_verdict(tmp_path):
    c = pair(tmp_path, arm=(9.9,), base=(8.0,))
    assert c.target.outcome == NO_INTERVAL
    assert "only one seed" in texts(c.flags)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("data", "x" * 64, "training data"),
        ("tokenizer", "x" * 64, "tokenizer"),
        ("eval_set", "x" * 64, "evaluation set"),
        ("batch_rows", 32, "the batch"),
        ("steps", 800, "number of steps"),
        ("schedule", "linear", "schedule"),
    ],
)
def test_arms_with_different_records_are_refused(tmp_path, field, value, words):
    c = pair(tmp_path, fairness={field: value})
    assert c.target.outcome == REFUSED
    assert c.effect is None
    assert c.ratio is None
    assert words in texts(c.refused)


def test_a_different_context_length_is_refused(tmp_path):
    c = pair(tmp_path, change=lambda k: replace(k, data=replace(k.data, max_length=64)))
    assert "data.max_length" in texts(c.refused)


def test_seeds_with_different_settings_are_refused(tmp_path):
    odd = lambda k: replace(k, optim=replace(k.optim, weight_decay=0.1)) if k.seed == 2 else k  # noqa: E731
    c = pair(tmp_path, change=odd)
    assert "optim.weight_decay" in texts(c.refused)


def test_a_diverged_seed_prevents_a_verdict_and_is_named(tmp_path):
    write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=3), state="diverged")
    c = pair(tmp_path, arm=(9.0, 9.1, 9.2))
    assert c.target.outcome == UNDECIDED
    assert c.target.reason == "diverged"
    assert "GPT-02 seed 3" in texts(c.flags)


def test_an_unfinished_seed_is_named(tmp_path):
    write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=3), state="interrupted")
    assert "GPT-02 seed 3 (interrupted)" in texts(pair(tmp_path).flags)


def test_an_unfinished_seed_with_other_settings_does_not_describe_its_arm(tmp_path):
    def first_seed_is_wrong(config):
        method = find_method("oelm-plus") if config.seed == 0 else config.method
        return replace(config, method=method, compare=replace(config.compare, arm=method.name))

    for seed, value in enumerate(B):
        write_run(tmp_path, lm_config(seed=seed), value)
        arm = first_seed_is_wrong(lm_config("GPT-02", "oelm-freeze", seed=seed))
        write_run(tmp_path, arm, 9.0 + value, state="finished" if seed else "interrupted")
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert (c.arm.name, c.arm.method.name) == ("oelm-freeze", "oelm-freeze")
    assert "GPT-02 seed 0 is not finished and has different settings" in texts(c.flags)


def test_unequal_learning_rates_get_no_verdict(tmp_path):
    untuned = TuneConfig()
    for seed in range(3):
        write_run(tmp_path, lm_config(seed=seed, tune=untuned), B[seed])
        arm = lm_config("GPT-02", "oelm-freeze", seed=seed, tune=untuned)
        write_run(tmp_path, replace(arm, optim=replace(arm.optim, lr=1e-2)), B[seed] * 0.9 + 0.01 * seed)
    analysis = analyze(tmp_path)
    (c,) = analysis.comparisons.of("baseline")
    assert (c.target.outcome, c.sign.outcome) == (WITHHELD, WITHHELD)
    assert c.effect is not None  # the numbers are shown
    (card,) = cards(analysis, Translator())[0].cards
    assert (card.tone, card.badge) == ("open", "no verdict")
    assert plain(card.lines[0]).startswith(
        "No verdict: not a fair comparison (the learning rates are 0.01 and 0.004, and neither was tuned)."
    )
    assert headline(analysis, Translator()).startswith("1 without a verdict")


def test_tuning_only_one_arm_gets_no_verdict(tmp_path):
    c = pair(tmp_path, change=lambda k: replace(k, tune=TuneConfig()))
    assert "unequal tuning" in texts(c.caveats)
    assert c.target.outcome == WITHHELD


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: replace(c, budget=replace(c.budget, steps=50)), "budget.steps 50, not 1200"),
        (lambda c: replace(c, data=replace(c.data, train_rows=9)), "data.train_rows 9, not 0"),
        (
            lambda c: replace(c, data=replace(c.data, source="builtin")),
            "generated text was used instead of tinystories",
        ),
    ],
)
def test_a_different_budget_or_built_in_text_gets_no_verdict(tmp_path, change, said):
    for seed in range(3):
        write_run(tmp_path, change(lm_config(seed=seed)), B[seed])
        write_run(tmp_path, change(lm_config("GPT-02", "oelm-freeze", seed=seed)), A[seed])
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert said in texts(c.caveats)
    assert c.target.outcome == WITHHELD


def test_datasets_with_the_same_test_rows_get_no_verdict_and_no_mean(tmp_path):
    for name, rows in (("wikitext2", "same"), ("wikitext103", "same"), ("tinystories", "")):
        write_arm(tmp_path, name, "baseline", B, rows=rows)
        write_arm(tmp_path, name, "oelm-freeze", A, rows=rows)
    analysis = analyze(tmp_path)
    outcomes = {c.dataset: (c.target.outcome, texts(c.caveats)) for c in analysis.comparisons.of("baseline")}
    assert outcomes["wikitext2"] == (WITHHELD, "the test rows are the same as those of wikitext103")
    assert outcomes["wikitext103"][0] == WITHHELD
    assert outcomes["tinystories"] == (UNDECIDED, "")
    assert analysis.means == []


def test_the_same_test_rows_withhold_also_the_verdicts_of_decide_and_of_study_files(tmp_path):
    for name in ("wikitext2", "wikitext103"):
        for arm, values in (("baseline", B), ("oelm-freeze", tuple(2 * b for b in B))):
            for seed, value in enumerate(values):
                config = lm_config(f"{name}-{arm}", arm, seed=seed)
                base = "" if arm == "baseline" else f"{name}-baseline"
                asked = (QuestionConfig(base, "non-inferior", 0.05),) if base else ()
                compared = CompareConfig(name, arm, base, questions=asked, max_seeds=12)
                config = replace(config, data=replace(config.data, dataset=name), compare=compared)
                write_run(tmp_path, config, value, rows="same")
    analysis = analyze(tmp_path)
    assert [c.target.outcome for c in analysis.comparisons.of("baseline")] == [WITHHELD] * 2
    assert [a.verdict.outcome for a in analysis.answers] == [WITHHELD] * 2
    assert analysis.means == []


def test_questions_that_were_changed_between_seeds_get_no_answer(tmp_path):
    def ask(config):
        margin = 0.2 if config.seed == 2 else 0.01
        return replace(
            config, compare=replace(config.compare, questions=(QuestionConfig("GPT-01", margin=margin),))
        )

    pair(tmp_path, change=ask)
    (answer,) = analyze(tmp_path).answers
    assert answer.verdict.outcome == REFUSED
    assert "seeds 2 were started with others" in texts(answer.comparison.refused)


def test_arms_with_different_number_formats_get_no_verdict(tmp_path):
    pair(tmp_path)
    for seed in range(3):
        folder = RunFolder(run_path(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=seed)))
        folder.write(replace(folder.manifest(), precision=PrecisionFacts("fp16")))
        folder.write_checksums()
    for seed in range(3):
        folder = RunFolder(run_path(tmp_path, lm_config(seed=seed)))
        folder.write(replace(folder.manifest(), precision=PrecisionFacts("fp32")))
        folder.write_checksums()
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert c.target.outcome == WITHHELD
    assert "the number format differs: fp16 against fp32" in texts(c.caveats)


def test_pairs_of_runs_in_different_number_formats_get_no_verdict(tmp_path):
    pair(tmp_path)
    for seed, (mine, theirs) in enumerate([("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")]):
        for config, dtype in ((lm_config("GPT-02", "oelm-freeze"), mine), (lm_config(), theirs)):
            folder = RunFolder(run_path(tmp_path, replace(config, seed=seed)))
            folder.write(replace(folder.manifest(), precision=PrecisionFacts(dtype)))
            folder.write_checksums()
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert c.target.outcome == WITHHELD
    assert "the two runs of a seed have different number formats: seed 0, 1" in texts(c.caveats)


def test_the_control_of_a_study_without_a_plain_baseline_is_not_called_a_baseline(tmp_path):
    for seed, value in enumerate(B):
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


def test_a_learning_rate_at_the_edge_of_its_grid_is_flagged(tmp_path):
    c = pair(tmp_path, change=lambda k: replace(k, optim=replace(k.optim, lr=8e-3)))
    assert "edge of its grid" in texts(c.flags)


@pytest.mark.parametrize("trial_seeds", [(0,), ()])  # (): the run names a grid, but no seeds of trials
def test_missing_trials_are_flagged(tmp_path, trial_seeds):
    for seed in range(2):
        for config, score in (
            (lm_config(seed=seed), B),
            (lm_config("GPT-02", "oelm-freeze", seed=seed), A),
        ):
            write_run(tmp_path, replace(config, tune=replace(config.tune, seeds=trial_seeds)), score[seed])
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert "0 of 3 tuning trials" in texts(c.flags)


def test_a_diverged_tuning_trial_is_not_missing(tmp_path):
    pair(tmp_path)
    config = lm_config("GPT-02", "oelm-freeze", seed=0)
    rate = config.tune.grid[-1]
    trial = replace(config, optim=replace(config.optim, lr=rate), tune=replace(config.tune, trial=True))
    (run_path(tmp_path, trial) / "results.json").unlink()
    write_run(tmp_path, trial, state="diverged", test=False)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert "tuning trials" not in texts(c.flags)
    elsewhere = replace(trial, study="another")
    run_path(tmp_path, trial).rename(tmp_path / "gone")  # trials of another study do not count
    write_run(tmp_path, elsewhere, test=False)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert "2 of 3 tuning trials" in texts(c.flags)


def test_selection_on_the_test_split_is_flagged(tmp_path):
    c = pair(tmp_path / "split", validation_print="e" * 64)
    assert "checkpoint was selected on the reported split" in texts(c.flags)
    write_trials(tmp_path / "trials", lm_config(seed=0), test=True)
    (tmp_path / "trials").mkdir(exist_ok=True)
    for seed in range(2):
        write_run(tmp_path / "trials", lm_config(seed=seed), B[seed])
        write_run(tmp_path / "trials", lm_config("GPT-02", "oelm-freeze", seed=seed), A[seed])
    (c,) = analyze(tmp_path / "trials").comparisons.of("baseline")
    assert "evaluated on the test split" in texts(c.flags)


def test_a_failed_freeze_audit_is_flagged(tmp_path):
    assert "the freeze audit failed" in texts(pair(tmp_path, audit_ok=False).flags)


def test_a_different_architecture_is_flagged_not_refused(tmp_path):
    c = pair(tmp_path, change=lambda k: replace(k, model=replace(k.model, position="rope")))
    assert c.effect is not None
    assert "model.position" in texts(c.flags)


def test_unpaired_seeds_are_flagged(tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path, lm_config(seed=seed), 8 + seed / 10)
    for seed in (5, 6, 7):
        write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=seed), 9 + seed / 10)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert c.effect.interval_kind == "Welch"
    assert "Welch" in texts(c.flags)


@pytest.mark.parametrize(
    ("changes", "trained", "said"),
    [
        ({}, "orthogonal-init", ""),
        ({"lowrank": 4}, "orthogonal-init", ""),  # a control has no adapters
        ({"gain": 2.0, "temperature": True}, "orthogonal-init", "(temperature False ≠ True, gain 1.0 ≠ 2.0)"),
        ({}, "oelm-random-matched", "(freeze all ≠ none)"),
    ],
)
def test_a_control_that_is_another_network_is_flagged(tmp_path, changes, trained, said):
    mine = replace(find_method("oelm-freeze"), name="mine", **changes)
    compared = CompareConfig("GPT/tinystories", "mine", control="CONTROL")
    for seed, value in enumerate((8.0, 8.1, 8.2)):
        write_run(tmp_path, lm_config("CONTROL", trained, seed=seed), value)
        config = lm_config("MINE", seed=seed, method=mine, compare=compared)
        write_run(tmp_path, config, (1.5 + 0.001 * seed) * value)
    (c,) = analyze(tmp_path).comparisons.of("control")
    assert said in texts(c.flags)
    assert ("is not the same network with trained Q/K" in texts(c.flags)) == bool(said)
    assert str(conclusion(c)).startswith("mine is worse" if said else "Freezing alone costs")


def test_identical_seeds_are_flagged(tmp_path):
    assert "have exactly the same result" in texts(pair(tmp_path, arm=(8.5, 8.5, 8.5)).flags)


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


# --- perplexity per document -----------------------------------------------------------------------------


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
