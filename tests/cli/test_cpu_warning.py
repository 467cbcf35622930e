"""The warning of `oelm train`, `run` and `decide` about runs that would take weeks on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oelm.cli.main import main
from oelm.errors import UsageError
from oelm.experiments.study import StudyOutcome


@pytest.fixture(autouse=True)
def _train_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise UsageError("nothing is trained in this test")

    monkeypatch.setattr("oelm.cli.train.train_folder", lambda *_: 0)
    monkeypatch.setattr("oelm.cli.run.run_study", lambda *_, **__: StudyOutcome())
    monkeypatch.setattr("oelm.experiments.decide.study.tune_and_decide", stop)
    monkeypatch.setenv("OELM_RUNS", str(tmp_path))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("command", ["train", "run", "decide"])
def test_at_scale_full_on_a_cpu_the_predicted_time_is_printed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([command, "GPT-02"])
    said = capsys.readouterr().err
    assert "warning: one run of GPT-0" in said
    assert " at scale full takes about " in said
    assert "--scale mini" in said


@pytest.mark.usefixtures("no_gpu")
def test_the_warning_leaves_the_json_output_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "GPT-02", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["runs"] == []
    assert "warning: one run of GPT-02" in printed.err


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("scale", ["mini", "smoke"])
def test_smaller_scales_have_no_warning(scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "GPT-02", "--scale", scale])
    main(["run", "GPT-02", "--scale", scale])
    assert "warning" not in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_there_is_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "GPT-02"])
    assert "warning" not in capsys.readouterr().err
    main(["train", "GPT-02", "--device", "cpu"])
    assert "warning: one run of GPT-02" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_a_short_run_of_a_study_file_at_scale_full_has_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.yaml"
    assert main(["init", str(file)]) == 0
    assert main(["run", str(file), "--set", "budget.steps=3", "model.name=tiny"]) == 0
    assert "warning" not in capsys.readouterr().err
