"""When a comparison is refused or gets no verdict, and what is said beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oelm.analysis.verdict import REFUSED, UNDECIDED, WITHHELD
from oelm.config.run_config import CompareConfig, QuestionConfig, TuneConfig
from oelm.methods.presets import find_method
from oelm.report.document import plain
from oelm.report.sentences import conclusion
from oelm.report.summary import cards, headline
from oelm.report.translate import Translator
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.schema import PrecisionFacts
from run_factory import (
    BASE_PPL,
    FROZEN_PPL,
    analyze,
    lm_config,
    pair,
    texts,
    write_arm,
    write_run,
    write_trials,
)


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


def test_values_that_neither_arm_recorded_are_flagged(tmp_path):
    unknown = {"tokenizer": "", "steps": 0}
    for id, arm, values in (("GPT-01", "baseline", BASE_PPL), ("GPT-02", "oelm-freeze", FROZEN_PPL)):
        for seed, value in enumerate(values):
            write_run(tmp_path, lm_config(id, arm, seed=seed), value, fairness=unknown)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert "neither arm recorded it: the tokenizer, the number of steps" in texts(c.flags)


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


@pytest.mark.parametrize("status", ["{", None])
def test_a_diverged_seed_without_a_readable_status_prevents_a_verdict(tmp_path, status):
    folder = write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=3), state="diverged")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 150, "kind": "event", "text": "diverged: the loss is nan"}\n')
    (folder / "status.json").unlink()
    if status is not None:
        (folder / "status.json").write_text(status)
    c = pair(tmp_path, arm=(9.0, 9.1, 9.2))
    assert c.target.reason == "diverged"


def test_an_unfinished_seed_is_named(tmp_path):
    write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=3), state="interrupted")
    assert "GPT-02 seed 3 (interrupted)" in texts(pair(tmp_path).flags)


def test_an_unfinished_seed_with_other_settings_does_not_describe_its_arm(tmp_path):
    def first_seed_is_wrong(config):
        method = find_method("oelm-plus") if config.seed == 0 else config.method
        return replace(config, method=method, compare=replace(config.compare, arm=method.name))

    for seed, value in enumerate(BASE_PPL):
        write_run(tmp_path, lm_config(seed=seed), value)
        arm = first_seed_is_wrong(lm_config("GPT-02", "oelm-freeze", seed=seed))
        write_run(tmp_path, arm, 9.0 + value, state="finished" if seed else "interrupted")
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert (c.arm.name, c.arm.method.name) == ("oelm-freeze", "oelm-freeze")
    assert "GPT-02 seed 0 is not finished and has different settings" in texts(c.flags)


def test_unequal_learning_rates_get_no_verdict(tmp_path):
    untuned = TuneConfig()
    for seed in range(3):
        write_run(tmp_path, lm_config(seed=seed, tune=untuned), BASE_PPL[seed])
        arm = lm_config("GPT-02", "oelm-freeze", seed=seed, tune=untuned)
        write_run(
            tmp_path, replace(arm, optim=replace(arm.optim, lr=1e-2)), BASE_PPL[seed] * 0.9 + 0.01 * seed
        )
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
        write_run(tmp_path, change(lm_config(seed=seed)), BASE_PPL[seed])
        write_run(tmp_path, change(lm_config("GPT-02", "oelm-freeze", seed=seed)), FROZEN_PPL[seed])
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert said in texts(c.caveats)
    assert c.target.outcome == WITHHELD


def test_datasets_with_the_same_test_rows_get_no_verdict_and_no_mean(tmp_path):
    for name, rows in (("wikitext2", "same"), ("wikitext103", "same"), ("tinystories", "")):
        write_arm(tmp_path, name, "baseline", BASE_PPL, rows=rows)
        write_arm(tmp_path, name, "oelm-freeze", FROZEN_PPL, rows=rows)
    analysis = analyze(tmp_path)
    outcomes = {c.dataset: (c.target.outcome, texts(c.caveats)) for c in analysis.comparisons.of("baseline")}
    assert outcomes["wikitext2"] == (WITHHELD, "the test rows are the same as those of wikitext103")
    assert outcomes["wikitext103"][0] == WITHHELD
    assert outcomes["tinystories"] == (UNDECIDED, "")
    assert analysis.means == []


def test_the_same_test_rows_withhold_also_the_verdicts_of_decide_and_of_study_files(tmp_path):
    for name in ("wikitext2", "wikitext103"):
        for arm, values in (("baseline", BASE_PPL), ("oelm-freeze", tuple(2 * b for b in BASE_PPL))):
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


def test_arms_with_different_precision_get_no_verdict(tmp_path):
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
    assert "the precision differs: fp16 against fp32" in texts(c.caveats)


def test_pairs_of_runs_with_different_precision_get_no_verdict(tmp_path):
    pair(tmp_path)
    for seed, (mine, theirs) in enumerate([("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")]):
        for config, dtype in ((lm_config("GPT-02", "oelm-freeze"), mine), (lm_config(), theirs)):
            folder = RunFolder(run_path(tmp_path, replace(config, seed=seed)))
            folder.write(replace(folder.manifest(), precision=PrecisionFacts(dtype)))
            folder.write_checksums()
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert c.target.outcome == WITHHELD
    assert "the two runs of a seed differ in precision: seed 0, 1" in texts(c.caveats)


def test_a_learning_rate_at_the_edge_of_its_grid_is_flagged(tmp_path):
    c = pair(tmp_path, change=lambda k: replace(k, optim=replace(k.optim, lr=8e-3)))
    assert "edge of its grid" in texts(c.flags)


@pytest.mark.parametrize("trial_seeds", [(0,), ()])  # (): the run names a grid, but no seeds of trials
def test_missing_trials_are_flagged(tmp_path, trial_seeds):
    for seed in range(2):
        for config, score in (
            (lm_config(seed=seed), BASE_PPL),
            (lm_config("GPT-02", "oelm-freeze", seed=seed), FROZEN_PPL),
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
        write_run(tmp_path / "trials", lm_config(seed=seed), BASE_PPL[seed])
        write_run(tmp_path / "trials", lm_config("GPT-02", "oelm-freeze", seed=seed), FROZEN_PPL[seed])
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


def test_identical_seeds_are_flagged(tmp_path):
    assert "have exactly the same result" in texts(pair(tmp_path, arm=(8.5, 8.5, 8.5)).flags)


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


def test_verdicts_at_scale_smoke_are_flagged(tmp_path):
    for seed, (base, frozen) in enumerate(zip(BASE_PPL, FROZEN_PPL, strict=True)):
        write_run(tmp_path, lm_config(seed=seed, scale="smoke"), base)
        write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=seed, scale="smoke"), frozen)
    (c,) = analyze(tmp_path).comparisons.of("baseline")
    assert "scale smoke only shows that the program works" in texts(c.flags)
