"""The run folder: claiming it, writing and reading its files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from fake_run import small_config
from oelm.config.run_config import CompareConfig, OptimConfig, QuestionConfig, TuneConfig
from oelm.errors import OelmError, UsageError
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.lock import RunLock
from oelm.runs.schema import Status


def test_folder_refuses_another_config(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.claim(small_config())
    folder.claim(small_config())
    assert folder.config() == small_config()
    with pytest.raises(UsageError, match="seed: 42 -> 7"):
        folder.claim(small_config(seed=7))


def test_the_questions_of_a_run_cannot_be_changed(tmp_path):
    def asking(margin):
        return small_config(compare=CompareConfig(questions=(QuestionConfig("x", "non-inferior", margin),)))

    folder = RunFolder(tmp_path / "run")
    folder.claim(asking(0.05))
    folder.claim(asking(0.05))
    with pytest.raises(UsageError, match="must not change after the first results"):
        folder.claim(asking(0.01))


def test_a_run_that_another_process_works_on_keeps_its_config(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.claim(small_config())
    folder.write_status(Status(state="failed"))
    with RunLock(folder.path), pytest.raises(UsageError, match="different config"):
        folder.claim(small_config(seed=7))
    folder.claim(small_config(seed=7))  # it failed before its first step
    assert folder.config().seed == 7


def test_a_folder_that_cannot_hold_the_run_says_what_to_do(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.claim(small_config())
    folder.config_file.write_text("", encoding="utf-8")
    with pytest.raises(OelmError, match=r"damaged: restore it from a copy, or delete .*/run to train"):
        folder.claim(small_config())
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="it is a file; move it away"):
        RunFolder(tmp_path / "file").claim(small_config())


def test_tuning_trials_live_beside_the_runs(tmp_path):
    config = small_config()
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


@pytest.mark.parametrize("name", ["../../etc", "/etc", "a/b", "a\\b", "..", ".git", "", "a\nb", "a\x1b[2J"])
def test_a_name_that_leads_out_of_the_runs_folder_is_refused(name, tmp_path):
    for field in ("id", "study"):
        with pytest.raises(UsageError, match=f"{field}: .* cannot be the name of a folder"):
            run_path(tmp_path, small_config(**{field: name}))
