from __future__ import annotations

from dataclasses import replace

from oelm.config.overrides import override
from oelm.experiments.catalogue import experiment, experiments, select
from oelm.experiments.experiment import Experiment
from oelm.experiments.fairness import check_arms, check_experiment, compare_settings
from oelm.experiments.request import Request
from oelm.experiments.study import unequal_settings


def test_unequal_learning_rates_of_the_original_study_are_marked() -> None:
    (unequal,) = check_experiment(experiment("GPT-02"), Experiment.at)
    assert str(unequal) == "GPT-02 has optim.lr 0.001, GPT-01 has 0.0003: as the original study published it"
    (unequal,) = check_experiment(experiment("SST-2-02"), Experiment.at)
    assert "0.0001" in str(unequal)


def test_every_unequal_setting_but_the_method_is_found() -> None:
    arm, base = experiment("GPT-02").at("full"), experiment("GPT-01").at("full")
    arm = override(arm, {"optim.lr": base.optim.lr, "budget.batch_size": 16, "data.max_length": 256})
    assert {d.field for d in compare_settings(arm, base)} == {"budget.batch_size", "data.max_length"}
    assert compare_settings(replace(arm, budget=base.budget, data=base.data), base) == []


def test_learning_rates_from_the_same_grid_count_as_equal() -> None:
    base = override(experiment("GPT-01").at("smoke"), {"tune.grid": (1e-3, 2e-3), "tune.seeds": (0,)})
    arm = override(experiment("GPT-02").at("smoke"), {"tune.grid": (1e-3, 2e-3), "tune.seeds": (0,)})
    assert check_arms([base, arm]) == []
    other_grid = override(arm, {"tune.grid": (1e-3, 2e-3, 4e-3)})
    found = check_arms([base, other_grid])
    assert {d.field for d in found} == {"optim.lr", "tune.grid"}
    assert {d.why for d in found} == {"unequal tuning"}


def test_arms_of_the_catalogue_differ_only_in_their_method() -> None:
    """Except that a baseline with rotary positions is compared with one with learned positions."""
    for study in ("gap", "finetune", "gpt-cls", "probes"):
        found = unequal_settings(Request(select(study=study), ("mini",)).arms())
        assert {d.field for d in found} <= {"model.position"}, [str(d) for d in found]
        assert all("rope" in d.arm for d in found)


def test_layer_wise_learning_rates_are_the_only_difference_among_the_controls() -> None:
    controls = [e for e in experiments().values() if e.phase == "extra"]
    found = unequal_settings(Request(controls, ("full",)).arms())
    assert {(d.arm, d.field) for d in found} == {("TS-LAYER-RATES", "optim.layer_decay")}
