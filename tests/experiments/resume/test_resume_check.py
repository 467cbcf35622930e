"""Comparison of two runs, and its limits. tests/torture/doctor.py runs the complete check."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest
import torch

from fake_run import small_config
from oelm.config.run_config import Machine
from oelm.experiments.resume.check import KILLS, PREEMPTIONS, judge, resume_check
from oelm.experiments.resume.compare_runs import FileDifference, compare_runs
from oelm.experiments.resume.interrupt_at import wait_at
from oelm.files.atomic import write_json
from oelm.runs.folder import RunFolder
from oelm.training import loop
from oelm.training.checkpoints.file import save_checkpoint
from oelm.training.signals import signals_to_handle


def test_the_folder_of_a_killed_check_is_removed_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, alive, elsewhere = (
        tmp_path / f".oelm-doctor-{host}-{pid}-x"
        for host, pid in ((gethostname(), gone.pid), (gethostname(), os.getpid()), ("other", gone.pid))
    )
    for folder in (dead, alive, elsewhere):
        (folder / "run").mkdir(parents=True)
    with resume_check(small_config(), tmp_path, Machine()) as check:
        assert check.place.parent == tmp_path
        assert {path for path in tmp_path.iterdir() if path != check.place} == {alive, elsewhere}
    assert set(tmp_path.iterdir()) == {alive, elsewhere}


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    """Two runs with equal files."""
    one, other = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "other")
    (one.best / "sub").mkdir(parents=True)
    rows = [{"step": step, "kind": "train", "loss": 1.0 / step} for step in (1, 2, 3)]
    one.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(one.results_file, {"steps": 3, "test": {"loss": 0.5}})
    (one.best / "sub" / "tokenizer.json").write_text("{}", encoding="utf-8")
    _save(one, torch.ones(3))
    shutil.copytree(one.path, other.path)
    return one, other


def _save(folder: RunFolder, weight: torch.Tensor) -> None:
    save_checkpoint({"metrics_bytes": 1, "model": {"w": weight}}, folder.latest, folder.previous)


def test_equal_runs_have_no_differences(two_runs: tuple[RunFolder, RunFolder]) -> None:
    assert compare_runs(two_runs[0].path, two_runs[1].path) == []


def test_a_difference_has_its_first_step_and_its_size(two_runs: tuple[RunFolder, RunFolder]) -> None:
    one, other = two_runs
    text = other.metrics_file.read_text(encoding="utf-8").replace('"loss": 0.5', '"loss": 0.75')
    other.metrics_file.write_text(text, encoding="utf-8")
    (found,) = compare_runs(one.path, other.path)
    assert (found.file, found.step, found.largest) == ("metrics.jsonl", 2, 0.25)
    assert str(found) == "metrics.jsonl: step 2, train, loss, by up to 0.25"


def test_weights_results_and_the_best_model_are_compared(two_runs: tuple[RunFolder, RunFolder]) -> None:
    one, other = two_runs
    _save(other, torch.tensor([1.0, 1.0, 1.5]))
    write_json(other.results_file, {"steps": 4, "test": {"loss": 0.5}})
    (other.best / "sub" / "tokenizer.json").unlink()
    found = {difference.file: difference for difference in compare_runs(one.path, other.path)}
    assert found["latest.pt"].where == "model.w"
    assert found["latest.pt"].largest == 0.5
    assert found["results.json"].others == 1
    assert "exists only in one run" in found["best/sub/tokenizer.json"].where


def test_a_nondeterministic_device_may_differ_by_a_multiple_of_its_spread() -> None:
    spread = [FileDifference("metrics.jsonl", "step 3", 0.01)]
    assert judge([], spread) == "equal"
    assert judge([FileDifference("metrics.jsonl", "step 2", 0.02)], spread) == "within spread"
    assert judge([FileDifference("metrics.jsonl", "step 2", 0.2)], spread) == "differs"
    assert judge([FileDifference("metrics.jsonl", "step 2", 0.02, others=1)], spread) == "differs"
    assert judge([FileDifference("results.json", "steps", others=1)], spread) == "differs"
    assert judge([FileDifference("results.json", "test.loss", 0.02)], spread) == "within spread"
    assert (
        judge([FileDifference("latest.pt", "model.w", 0.02)], spread) == "differs"
    )  # the weights had no spread
    assert judge([FileDifference("metrics.jsonl", "step 2", 1e-9)], []) == "differs"


def test_the_interruptions_cover_steps_checkpoints_and_signals() -> None:
    moments = {(i.moment, i.signal.name) for i in KILLS}
    assert {("step", "SIGKILL"), ("checkpoint", "SIGKILL"), ("step", "SIGTERM")} <= moments
    assert {"SIGTERM", "SIGUSR1", "SIGUSR2"} <= {i.signal.name for i in PREEMPTIONS}


def test_the_interrupted_run_handles_sighup_also_under_nohup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nohup` makes a process and its children ignore SIGHUP, which the check sends on purpose."""
    monkeypatch.setattr(loop, "clip_gradients", loop.clip_gradients)  # wait_at replaces it
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        wait_at("step", 1, tmp_path / "marker")
        assert signal.SIGHUP in signals_to_handle()
    finally:
        signal.signal(signal.SIGHUP, before)
