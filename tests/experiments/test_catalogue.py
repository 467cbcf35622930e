"""The catalogue has the settings of the original study, which are repeated here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oelm.config.hash import config_hash
from oelm.config.run_config import DataConfig, RunConfig
from oelm.config.yaml import config_from_yaml, config_to_yaml
from oelm.data.catalogue import dataset
from oelm.errors import UsageError
from oelm.experiments import experiment as experiment_module
from oelm.experiments.catalogue import (
    PHASES,
    experiment,
    experiments,
    register_experiment,
    reported_with,
    select,
)
from oelm.experiments.experiment import Experiment, stand_ins
from oelm.experiments.fairness import check_arms
from oelm.experiments.request import Request
from oelm.experiments.scales import SCALES
from oelm.methods.apply import apply
from oelm.runs.states import EXIT_USAGE
from oelm.training.build_model import build_model

# ID: dataset, method, learning rate, steps or batch size, reported result
LANGUAGE_MODELS = {
    "GPT-01": ("tinystories", "baseline", 3e-4, 100_000, 4.27),
    "GPT-02": ("tinystories", "oelm-freeze", 1e-3, 100_000, 4.69),
    "GPT-03": ("tinystories", "oelm-random", 1e-3, 100_000, 4.97),
    "GPT-04": ("openwebtext", "baseline", 3e-4, 100_000, 47.24),
    "GPT-05": ("openwebtext", "oelm-freeze", 1e-3, 100_000, 54.29),
    "GPT-06": ("wikitext103", "baseline", 3e-4, 200_000, 25.13),
    "GPT-07": ("wikitext103", "oelm-freeze", 1e-3, 200_000, 29.03),
}
FINE_TUNED = {
    "XNLI-01": ("xnli", "baseline", 2e-5, 16, 76.71),
    "XNLI-02": ("xnli", "oelm-freeze", 1e-4, 16, 77.79),
    "SST-2-01": ("sst2", "baseline", 2e-5, 32, 93.12),
    "SST-2-02": ("sst2", "oelm-freeze", 1e-4, 32, 91.28),
    "MNLI-01": ("mnli", "baseline", 2e-5, 32, 83.44),
    "MNLI-02": ("mnli", "oelm-freeze", 1e-4, 32, 82.23),
}
CLASSIFIERS = {
    f"GPT-CLS-{number:02d}": (
        dataset,
        "baseline" if number % 2 else "oelm-freeze",
        3e-4 if number % 2 else 1e-3,
    )
    for number, dataset in enumerate(
        ("imdb", "imdb", "agnews", "agnews", "xnli", "xnli", "mnli", "mnli"), start=1
    )
}


@pytest.mark.parametrize("id", LANGUAGE_MODELS)
def test_language_models_have_the_settings_of_the_original_study(id: str) -> None:
    dataset, method, rate, steps, ppl = LANGUAGE_MODELS[id]
    e, c = experiment(id), experiment(id).at("full")
    assert (c.task, c.data.dataset, c.method.name, c.optim.lr, c.budget.steps) == (
        *("lm", dataset, method),
        *(rate, steps),
    )
    assert (c.model.family, c.model.name, c.model.position, c.model.dropout) == (
        "gpt",
        "medium-512",
        "learned",
        0.1,
    )
    assert (c.data.tokenizer, c.data.max_length, c.budget.batch_size) == ("gpt2", 512, 8)
    assert (c.optim.schedule, c.optim.warmup_steps, c.optim.clip) == ("cosine", 1000, 1.0)
    assert (c.budget.eval_every, c.seed) == (1000, 42)
    assert e.reported is not None
    assert (e.reported.metric, e.reported.value) == ("ppl", ppl)
    assert c.compare.phase == (2 if id in ("GPT-01", "GPT-02") else 3)


@pytest.mark.parametrize("id", FINE_TUNED)
def test_fine_tuned_models_have_the_settings_of_the_original_study(id: str) -> None:
    dataset, method, rate, batch, accuracy = FINE_TUNED[id]
    e, c = experiment(id), experiment(id).at("full")
    assert (c.task, c.data.dataset, c.method.name) == ("classification", dataset, method)
    assert (c.optim.lr, c.budget.batch_size, c.budget.epochs, c.budget.steps) == (rate, batch, 3, 0)
    assert (c.model.family, c.model.name, c.model.pretrained) == ("hf", "bert-base-uncased", True)
    assert (c.data.max_length, c.data.tokenizer) == (128, "model")
    assert (c.optim.schedule, c.optim.warmup_share, c.optim.clip) == ("linear", 0.1, 1.0)
    assert e.reported is not None
    assert (e.reported.metric, e.reported.value) == ("accuracy", accuracy)
    assert c.compare.phase == (1 if dataset == "xnli" else "paper")
    assert any("batch 32 comes from" in note for note in e.notes) == (batch == 32)


@pytest.mark.parametrize("id", CLASSIFIERS)
def test_classifiers_from_scratch_have_the_settings_of_the_original_study(id: str) -> None:
    dataset, method, rate = CLASSIFIERS[id]
    c = experiment(id).at("full")
    assert (c.task, c.data.dataset, c.method.name, c.optim.lr) == ("classification", dataset, method, rate)
    assert (c.model.family, c.model.name, c.model.causal) == ("gpt", "medium-512", False)
    assert (c.budget.batch_size, c.budget.accumulation, c.budget.steps) == (16, 2, 10_000)
    assert (c.optim.warmup_steps, c.data.max_length) == (500, 512)
    assert c.compare.phase == 4


def test_the_phases_have_exactly_the_experiments_of_the_original_study() -> None:
    ids = {e.id for e in select(phases=[1, 2, 3, 4, "paper"])}
    assert ids == {*LANGUAGE_MODELS, *FINE_TUNED, *CLASSIFIERS}


@pytest.mark.parametrize("scale", SCALES)
def test_every_experiment_has_a_valid_config_that_yaml_keeps(scale: str) -> None:
    for e in experiments().values():
        config = Request([e], (scale,)).config(e, scale, 0)  # type: ignore[arg-type]
        again = config_from_yaml(config_to_yaml(config))
        assert config_hash(again) == config_hash(config), e.id


@pytest.mark.parametrize("scale", ["smoke", "mini"])
def test_every_method_fits_the_gpt_of_its_experiment(scale: str) -> None:
    """The method is applied to the real model, which may refuse it."""
    tried = set()
    for e in experiments().values():
        config = e.at(scale)  # type: ignore[arg-type]
        if config.model.family == "gpt" and (key := (config.model, config.method)) not in tried:
            tried.add(key)
            classes = 0 if config.model.causal else 2
            model = build_model(config, vocab_size=300, classes=classes, pad_id=0, eos_id=1)
            apply(model, config.method, seed=0)


def test_baselines_and_controls_exist_and_train_their_queries_and_keys() -> None:
    known = experiments()
    for e in known.values():
        for partner in (e.baseline, e.control):
            assert partner == "" or partner in known, f"{e.id} names {partner}"
        if e.control:
            assert known[e.control].at("smoke").method.trains_qk, f"{e.id} is controlled by {e.control}"
        if e.baseline:
            assert known[e.baseline].at("smoke").compare.group == e.at("smoke").compare.group


def test_a_control_differs_from_its_arm_only_in_what_trains() -> None:
    """Otherwise a gain of the architecture would be attributed to freezing."""
    known = experiments()
    pairs = [(e, known[e.control]) for e in known.values() if e.study == "gap" and e.control]
    assert pairs
    for arm, control in pairs:
        a, c = arm.at("mini").method, control.at("mini").method
        # The control has no low-rank adapter, because its W trains.
        same = ["bias", "bias_scale", "conv", "conv_value", "core", "temperature", "relative_bias"]
        same += ["init", "gain"] if a.has_extras else []
        assert [getattr(a, x) for x in same] == [getattr(c, x) for x in same], arm.id
        assert arm.at("mini").model == control.at("mini").model, arm.id


def test_partial_freezing_trains_as_many_layers_as_its_name_says() -> None:
    layers = [experiment(f"TS-PARTIAL-{n}").at("mini").method.layers for n in (1, 2)]
    assert layers == [1, 2]


def test_small_scales_keep_the_shape_and_need_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OELM_DATA_DIR", raising=False)
    for e in experiments().values():
        full = e.at("full")
        for scale in ("mini", "smoke"):
            small = e.at(scale)  # type: ignore[arg-type]
            hub = dataset(small.data.dataset).hub  # other datasets come from pip or are built in
            assert small.data.source in (("local", "builtin") if hub else ("auto", "builtin")), e.id
            assert small.data.tokenizer != "gpt2", e.id
            assert (small.task, small.method, small.model.family) == (
                full.task,
                full.method,
                full.model.family,
            )
            assert small.compare == full.compare
            assert (small.model.position, small.model.causal) == (full.model.position, full.model.causal)
            assert bool(small.budget.epochs) == bool(full.budget.epochs)
    ratio = experiment("GPT-02").at("mini").optim.lr / experiment("GPT-01").at("mini").optim.lr
    assert ratio == pytest.approx(1e-3 / 3e-4)
    assert experiment("GPT-06").at("mini").budget.steps == 2 * experiment("GPT-04").at("mini").budget.steps


def test_a_data_folder_must_have_the_dataset(tmp_path: Path) -> None:
    """A data folder without the dataset is an error at every scale, unless the user chooses other text."""
    (tmp_path / "tinystories").mkdir()
    (tmp_path / "tinystories" / "train.jsonl").write_text('{"text": "Once."}\n', encoding="utf-8")
    folder = str(tmp_path)
    assert experiment("GPT-01").at("mini", data_dir=folder).data.source == "local"
    assert stand_ins(experiment("GPT-01").at("mini", data_dir=folder)) == []
    for scale in ("mini", "full"):
        with pytest.raises(UsageError, match="no folder 'openwebtext'; it has tinystories"):
            experiment("GPT-04").at(scale, data_dir=folder)  # type: ignore[arg-type]
    chosen = experiment("GPT-04").at("mini", data_dir=folder, changes={"data.source": "builtin"})
    assert "built-in text replaces 'openwebtext'" in stand_ins(chosen)[0]
    assert experiment("GPT-01").at("smoke", data_dir=folder).data.source == "builtin"


@pytest.mark.parametrize("installed", [True, False])
def test_mini_bert_is_minilm_if_its_package_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(experiment_module, "minilm_installed", lambda: installed)
    config = experiment("SST-2-02").at("mini")
    assert (config.model.name, config.model.pretrained) == (
        ("minilm", True) if installed else ("tiny-bert", False)
    )
    if not installed:
        with pytest.raises(UsageError, match="pip install"):  # the user named it
            experiment("SST-2-02").at("mini", changes={"model.name": "minilm"})
    notes = " ".join(stand_ins(config))
    assert ("all-MiniLM-L6-v2" in notes) if installed else ("model 'tiny-bert' replaces" in notes)


def test_a_user_can_register_an_experiment() -> None:
    mine = Experiment(
        id="MINE-01",
        study="mine",
        task="lm",
        data=DataConfig("tinystories"),
        method="oelm_v2",
        baseline="GPT-01",
    )
    try:
        register_experiment(mine)
        assert experiment("mine-01").at("smoke").method.name == "oelm-freeze"
        assert select(study="mine") == [mine]
        with pytest.raises(UsageError, match="already has an experiment"):
            register_experiment(replace(mine))
    finally:
        from oelm.experiments import catalogue

        catalogue._registered.pop("MINE-01", None)


@pytest.mark.parametrize("id", ["", "../up", "a b", "a/b", ".hidden"])
def test_ids_that_cannot_name_a_folder_are_refused(id: str) -> None:
    with pytest.raises(UsageError):
        register_experiment(Experiment(id=id, study="s", task="lm", data=DataConfig("x"), method="baseline"))


def test_selection() -> None:
    assert [e.id for e in select(phases=["3"])] == [f"GPT-0{n}" for n in range(3, 8)]
    assert reported_with([3]) == [f"GPT-0{n}" for n in range(1, 8)]
    assert [e.id for e in select(phases=["paper"])] == ["SST-2-01", "SST-2-02", "MNLI-01", "MNLI-02"]
    assert {e.phase for e in select(everything=True)} == set(PHASES)
    with pytest.raises(UsageError, match="GPT-01"):
        select(["GPT-O1"])
    with pytest.raises(UsageError, match="there is no phase 9"):
        select(phases=[9])
    with pytest.raises(UsageError, match="no experiments selected"):
        select()


def test_every_config_has_a_folder_of_its_own() -> None:
    from oelm.runs.layout import run_path

    configs: list[RunConfig] = [e.at("smoke") for e in experiments().values()]
    assert len({run_path("runs", c) for c in configs}) == len(configs)


def test_arms_of_the_demo_differ_in_nothing_but_their_method() -> None:
    """All arms share one learning rate, and each frozen arm has a control."""
    arms = select(study="demo")
    assert check_arms([e.at("mini", 0) for e in arms]) == []
    assert {e.id: e.control for e in arms if e.control} == {
        "DEMO-LM-oelm-freeze": "DEMO-LM-orthogonal-init",
        "DEMO-LM-oelm-bias": "DEMO-LM-trained-bias",
        "DEMO-LM-oelm-plus": "DEMO-LM-trained-plus",
        "DEMO-CLS-oelm-freeze": "DEMO-CLS-orthogonal-init",
    }


def test_a_method_that_leaves_nothing_frozen_is_refused_before_it_runs() -> None:
    """TS-PARTIAL-2 needs three layers."""
    e = experiment("TS-PARTIAL-2")
    with pytest.raises(UsageError, match=r"would freeze nothing: it trains .* this model has only 2"):
        Request([e], ("smoke",), changes={"model.name": "smoke"}).config(e, "smoke", 0)
    shallow = e.at("smoke", changes={"model.name": "smoke"})
    model = build_model(shallow, vocab_size=300, classes=0, pad_id=0, eos_id=1)
    with pytest.raises(UsageError) as refused:  # exit code 2: a launcher does not retry it
        apply(model, shallow.method, seed=0)
    assert refused.value.exit_code == EXIT_USAGE
