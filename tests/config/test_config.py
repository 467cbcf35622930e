"""Reading, writing, hashing and comparing configs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_run import small_config
from oelm.config.diff import config_diff
from oelm.config.hash import config_hash
from oelm.config.limits import check_config
from oelm.config.mapping import parse
from oelm.config.run_config import BudgetConfig, OptimConfig, TuneConfig
from oelm.config.yaml import config_from_yaml, config_to_yaml
from oelm.errors import UsageError


@given(
    lr=st.floats(1e-9, 10),
    steps=st.integers(0, 10**9),
    grid=st.lists(st.floats(0, 1, allow_nan=False), max_size=4),
    identity=st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12),
)
def test_config_survives_yaml(lr, steps, grid, identity):
    config = small_config(
        id=identity,
        optim=OptimConfig(lr=lr),
        budget=BudgetConfig(steps=steps),
        tune=TuneConfig(grid=tuple(grid), seeds=(1, 2)),
    )
    again = config_from_yaml(config_to_yaml(config))
    assert again == config
    assert config_hash(again) == config_hash(config)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("warmup_steps", "warmup_step", "did you mean 'warmup_steps'"),
        ("lr: 0.0003", "lr: fast", "optim.lr: expected a number, got 'fast'"),
        ("seed: 42", "seed: 4.5", "seed: expected a whole number"),
        ("seed: 42", "seed: true", "seed: expected a whole number"),
        ("task: lm", "task: lmm", "did you mean 'lm'"),
        ("compile: false", "compile: 0", "compile: expected true or false"),
        ("id: GPT-01\n", "", "the field 'id' is missing"),
        ("study: paper", "study: [", "not valid YAML"),
    ],
)
def test_config_errors_name_the_place(old, new, message):
    text = config_to_yaml(small_config())
    assert old in text
    with pytest.raises(UsageError) as caught:
        config_from_yaml(text.replace(old, new, 1))
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [{"weight_decay": math.inf}, {"qk_lr": math.inf}, {"layer_decay": 2.0}])
def test_optimizer_settings_out_of_range_are_errors_before_a_run_starts(value):
    with pytest.raises(UsageError, match=rf"optim.{next(iter(value))} must be (a finite|between)"):
        check_config(small_config(optim=OptimConfig(**value)))


def test_a_whole_number_in_a_decimal_field_does_not_change_the_hash():
    config = small_config(optim=OptimConfig(weight_decay=0))
    assert config_hash(config) == config_hash(config_from_yaml(config_to_yaml(config), "x"))


def test_rate_without_a_dot_is_a_number():
    text = config_to_yaml(small_config()).replace("lr: 0.0003", "lr: 1e-4", 1)
    assert config_from_yaml(text).optim.lr == 1e-4


@pytest.mark.parametrize(
    "name", ["no", "0300", "0900", "1e5", "12:30", "1_000", "2026-01-02", "-.5", "<<", "~"]
)
def test_a_study_with_the_name_of_a_number_survives_yaml(name):
    config = small_config(study=name)
    assert config_from_yaml(config_to_yaml(config)) == config


def test_command_line_words_become_typed_values():
    assert parse(float, "1e-3", "optim.lr") == 1e-3
    assert parse(tuple[float, ...], "1e-3,3e-3", "tune.grid") == (1e-3, 3e-3)
    assert [parse(bool, word, "compile") for word in ("on", "off", "Yes")] == [True, False, True]
    assert parse(int, "0300", "budget.steps") == 300
    assert parse(float | str, "match", "method.gain") == "match"
    with pytest.raises(UsageError, match=r"budget\.steps: expected a whole number"):
        parse(int, "many", "budget.steps")


def test_diff_names_each_field_that_differs():
    a, b = small_config(), small_config(seed=7, optim=OptimConfig(lr=1e-3))
    assert config_diff(a, b) == {"optim.lr": (3e-4, 1e-3), "seed": (42, 7)}
    assert config_diff(a, a) == {}
    assert config_hash(a) != config_hash(b)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "seed: 7\n",  # the key appears twice
        lambda text: text.replace("seed: 3", "seed: three"),
        lambda text: text.replace("  dataset:", "dataset:", 1),
        lambda text: text.replace("id: ", "id: &a ", 1) + "copy: *a\n",
        lambda text: "- " + text,
        lambda text: "id: 'a\nseed: 3\n",
    ],
)
def test_reading_by_section_accepts_no_more_than_reading_the_whole_file(change):
    text = change(config_to_yaml(small_config(seed=3)))
    with pytest.raises(UsageError, match=r"run\.yaml"):
        config_from_yaml(text, "run.yaml")
