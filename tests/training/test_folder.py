"""The run folder and the strict config reader: what a user sees when a file is right, wrong or half there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.config.diff import config_diff
from oelm.config.hash import config_hash
from oelm.config.mapping import parse
from oelm.config.run_config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TuneConfig
from oelm.config.yaml import config_from_yaml, config_to_yaml
from oelm.errors import OelmError, UsageError
from oelm.methods.method import Method
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.schema import Status
from oelm.training.logs.manifest import base_manifest


def make_config(**changes) -> RunConfig:
    base = RunConfig(
        id="GPT-01",
        study="paper",
        task="lm",
        data=DataConfig(dataset="stories"),
        model=ModelConfig(name="smoke"),
        method=Method(name="baseline"),
    )
    return replace(base, **changes)


@given(
    lr=st.floats(1e-9, 10),
    steps=st.integers(0, 10**9),
    grid=st.lists(st.floats(0, 1, allow_nan=False), max_size=4),
    identity=st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12),
)
def test_config_survives_yaml(lr, steps, grid, identity):
    config = make_config(
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
    text = config_to_yaml(make_config())
    assert old in text
    with pytest.raises(UsageError) as caught:
        config_from_yaml(text.replace(old, new, 1))
    assert message in str(caught.value)


def test_rate_without_a_dot_is_a_number():
    text = config_to_yaml(make_config()).replace("lr: 0.0003", "lr: 1e-4", 1)
    assert config_from_yaml(text).optim.lr == 1e-4


def test_command_line_words_become_typed_values():
    assert parse(float, "1e-3", "optim.lr") == 1e-3
    assert parse(tuple[float, ...], "1e-3,3e-3", "tune.grid") == (1e-3, 3e-3)
    assert parse(float | str, "match", "method.gain") == "match"
    with pytest.raises(UsageError, match=r"budget\.steps: expected a whole number"):
        parse(int, "many", "budget.steps")


def test_diff_names_each_field_that_differs():
    a, b = make_config(), make_config(seed=7, optim=OptimConfig(lr=1e-3))
    assert config_diff(a, b) == {"optim.lr": (3e-4, 1e-3), "seed": (42, 7)}
    assert config_diff(a, a) == {}
    assert config_hash(a) != config_hash(b)


def test_folder_refuses_another_config(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.claim(make_config())
    folder.claim(make_config())
    assert folder.config() == make_config()
    with pytest.raises(UsageError, match="seed: 42 -> 7"):
        folder.claim(make_config(seed=7))


def test_tuning_trials_live_beside_the_runs(tmp_path):
    config = make_config()
    assert run_path(tmp_path, config) == tmp_path / "paper/GPT-01/scale=full/seed=42"
    trial = replace(config, tune=TuneConfig(trial=True), optim=OptimConfig(lr=1e-3))
    assert run_path(tmp_path, trial) == tmp_path / "paper/GPT-01/scale=full/tune/lr=0.001/seed=42"


def test_status_round_trip_and_heartbeat(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.status() is None
    written = folder.write_status(Status(step=3, total_steps=10, loss=1.5))
    assert folder.status() == written
    assert written.age < 60


def test_broken_files_are_named(tmp_path):
    folder = RunFolder(tmp_path)
    folder.results_file.write_text("{")
    with pytest.raises(OelmError, match=r"results\.json: not JSON"):
        folder.results()
    with pytest.raises(OelmError, match="not a run folder"):
        folder.config()
    folder.metrics_file.write_text('{"step": 1, "kind": "train"}\nnonsense\n')
    with pytest.raises(OelmError, match="line 2"):
        list(folder.metrics())


def test_a_metrics_line_still_being_written_is_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics_file.write_text(
        json.dumps({"step": 1, "kind": "train"}) + "\n" + json.dumps({"step": 2, "kind": "event"}) + '\n{"st'
    )
    assert [row.step for row in folder.metrics()] == [1, 2]
    assert [row.step for row in folder.metrics("event")] == [2]


def test_reading_a_run_needs_no_torch():
    code = "import sys, oelm.runs.folder; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def test_a_manifest_names_the_data_folder_that_only_the_environment_knows(monkeypatch):
    monkeypatch.setenv("OELM_DATA_DIR", "my data")
    assert (
        base_manifest("", "/somewhere/bin/oelm run GPT-01").command
        == "OELM_DATA_DIR='my data' oelm run GPT-01"
    )
    typed = "oelm run GPT-01 --data-dir other"
    assert base_manifest("", typed).command == typed


@pytest.mark.parametrize("name", ["../../etc", "/etc", "a/b", "a\\b", "..", ".git", "", "a\nb", "a\x1b[2J"])
def test_a_name_that_leads_out_of_the_runs_folder_is_refused(name, tmp_path):
    for field in ("id", "study"):
        with pytest.raises(UsageError, match=f"{field}: .* cannot be the name of a folder"):
            run_path(tmp_path, make_config(**{field: name}))
