"""The output and the exit code of `oelm doctor --resume` and `--preempt`.

The check is replaced by fixed results here; tests/torture/doctor.py runs the real one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.config.run_config import Machine, RunConfig
from oelm.experiments.resume.check import PREEMPTIONS, Case, Interruption, Reference, ResumeCheck
from oelm.experiments.resume.compare_runs import FileDifference
from oelm.training.fit import Outcome


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """Replace the check by one that always passes; a test can set the result for a signal by its name."""
    results: dict[str, Case] = {}

    def case(self: ResumeCheck, interruption: Interruption) -> Case:
        sound = Case(interruption, "equal", stop_seconds=0.5, resumed_after=interruption.resumes_after)
        return results.get(interruption.signal.name, sound)

    monkeypatch.setattr(ResumeCheck, "reference", lambda self: Reference(3.0, "cpu", "fp32", ()))
    monkeypatch.setattr(ResumeCheck, "case", case)
    return results


def test_a_passed_check_is_a_table_and_exit_code_0(
    fake: dict[str, Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "GPT-01", "--scale", "smoke", "--resume", "--runs", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert "GPT-01 (smoke) on cpu in fp32" in text
    assert "SIGKILL in checkpoint 1" in text
    assert "the beginning" in text
    assert "proven: after each of 4 interruptions" in text
    assert list(tmp_path.iterdir()) == []  # temporary files are deleted, and no runs folder was created


def test_without_a_named_experiment_a_small_one_is_checked(
    fake: dict[str, Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--preempt", "--runs", str(tmp_path), "--json"]) == 0
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert (check["id"], check["scale"], check["ok"]) == ("GPT-02", "smoke", True)
    assert {"SIGTERM", "SIGUSR1", "SIGUSR2"} <= {case["signal"] for case in check["cases"]}
    assert not [case for case in check["cases"] if case["signal"] == "SIGKILL"]


def test_a_file_in_place_of_the_runs_folder_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/runs"):
        assert main(["doctor", "--runs", str(tmp_path / name)]) == 1
        assert f"problem  runs folder: {tmp_path / 'file'} is not a folder" in capsys.readouterr().out


def test_a_preempted_run_is_compared_with_the_grace_period(
    fake: dict[str, Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--preempt", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "exited with code 75, which asks for requeueing, within 0.5 s" in text
    assert "asks SLURM for 120 s" in text
    fake["SIGUSR1"] = Case(PREEMPTIONS[1], "failed", "no checkpoint")
    assert main(["doctor", "--preempt", "--runs", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "failed: no checkpoint" in text
    assert "exited with code 75" not in text


def test_a_run_that_differs_is_shown_and_is_exit_code_1(
    fake: dict[str, Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from oelm.experiments.resume.check import KILLS

    difference = FileDifference("metrics.jsonl", "step 4, train, loss", 0.25, step=4)
    fake["SIGTERM"] = Case(KILLS[3], "differs", differences=(difference,), resumed_after=3)
    assert main(["doctor", "GPT-02", "--scale", "smoke", "--resume", "--runs", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "metrics.jsonl: step 4, train, loss, by up to 0.25" in text
    assert "not proven: 1 of 4" in text


def test_an_interrupted_step_ends_the_whole_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def interrupted(config: RunConfig, folder: Path, machine: Machine) -> Outcome:
        calls.append(config.id)
        return Outcome("interrupted", "stopped by SIGINT")

    monkeypatch.setattr("oelm.training.fit.fit", interrupted)
    code = main(["doctor", "GPT-01", "GPT-02", "--scale", "smoke", "--runs", str(tmp_path / "runs")])
    assert (code, calls) == (130, ["GPT-01"])
