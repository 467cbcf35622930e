"""Predictions for a GPU: plain arithmetic, corrected by measured runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.config.overrides import override
from oelm.experiments.catalogue import experiment
from oelm.experiments.predict import GPUS, Predictor, find_gpu
from oelm.models import loss
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.schema import Manifest, TimingStats


def test_frozen_parameters_save_memory_and_communication(tmp_path: Path) -> None:
    trained, frozen = (
        Predictor(GPUS["A100"], tmp_path).predict(experiment(id).at("full", 0)) for id in ("GPT-01", "GPT-02")
    )
    qk = 3_145_728  # docs: Q/K of Medium-512
    assert trained.ddp_bytes == 4 * 44_896_768
    assert trained.ddp_bytes - frozen.ddp_bytes == frozen.ddp_bytes_saved == 4 * qk
    assert trained.memory_bytes - frozen.memory_bytes == 12 * qk  # gradient and two moments, fp32
    assert frozen.step_seconds < trained.step_seconds
    assert frozen.steps == 100_000
    assert frozen.seconds == 100_000 * frozen.step_seconds
    assert "predicted, not measured" in frozen.assumption


def test_the_memory_contains_the_logits_of_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = experiment("GPT-01").at("full", 0)
    memory = []
    for elements in (loss.CHUNK_ELEMENTS, loss.CHUNK_ELEMENTS // 2):
        monkeypatch.setattr(loss, "CHUNK_ELEMENTS", elements)
        memory.append(Predictor(GPUS["A100"], tmp_path).predict(config).memory_bytes)
    assert memory[0] - memory[1] == 10 * loss.CHUNK_ELEMENTS


def test_a_small_model_is_limited_by_starting_kernels(tmp_path: Path) -> None:
    config = experiment("GPT-01").at("smoke", 0)
    times = {Predictor(gpu, tmp_path).predict(config).step_seconds for gpu in GPUS.values()}
    assert len(times) == 1


def test_measured_runs_of_the_study_correct_the_prediction(tmp_path: Path) -> None:
    config = experiment("GPT-02").at("smoke", 0)
    plain = Predictor(GPUS["H100"], tmp_path).predict(config)
    measured = override(experiment("GPT-01").at("smoke", 0), {"budget.steps": 3})
    other = Predictor(GPUS["A5000"], tmp_path).predict(measured)
    folder = RunFolder(run_path(tmp_path, measured))
    folder.claim(measured)
    folder.write(TimingStats(median_step_time=3 * other.step_seconds, num_steps_measured=3))
    folder.write(Manifest(machine={"gpus": ["NVIDIA RTX A5000"]}))
    corrected = Predictor(GPUS["H100"], tmp_path).predict(config)
    assert corrected.step_seconds == pytest.approx(3 * plain.step_seconds)
    assert "multiplied by 3.00, from 1 measured" in corrected.assumption


def test_each_measured_run_is_compared_with_the_prediction_for_its_own_gpu(tmp_path: Path) -> None:
    for seed, gpu in enumerate(("A100", "A100", "H100")):
        config = experiment("GPT-01").at("full", seed)
        folder = RunFolder(run_path(tmp_path / "runs", config))
        folder.claim(config)
        seconds = Predictor(GPUS[gpu], tmp_path / "none").predict(config).step_seconds
        folder.write(TimingStats(median_step_time=2 * seconds))
        folder.write(Manifest(machine={"gpus": [f"NVIDIA {gpu}"]}))
    assert Predictor(GPUS["A100"], tmp_path / "runs").predict(config).correction == pytest.approx(2)


def test_gpus_are_found_by_the_names_of_the_driver() -> None:
    assert find_gpu("NVIDIA A100-SXM4-80GB").name == find_gpu("a100").name == "A100"
    assert find_gpu("NVIDIA GeForce RTX 4090").name == "4090"


def test_a_tuning_trial_counts_as_part_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["GPT-01", "--scale", "smoke", "--seeds", "0", "--tune", "--grid", "0.001", "0.002"]
    options = ["--gpus", "none", "--runs", str(tmp_path), "--dry-run", "--gpu", "A5000", "--json"]
    assert main(["run", *asked, *options]) == 0
    (predicted,) = json.loads(capsys.readouterr().out)["gpu"]["predictions"]
    trials = 2 * 2  # two learning rates with two trial seeds each
    assert predicted["runs"] == 1 + trials * experiment("GPT-01").trial_share


def test_a_dry_run_gives_hours_for_a_named_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["PROBE-recall-oelm-freeze-rope", "--scale", "smoke", "--gpus", "none", "--runs", str(tmp_path)]
    for command in ("run", "decide"):
        assert main([command, *rest, "--dry-run", "--gpu", "A5000"]) == 0
        printed = capsys.readouterr().out
        assert "on A5000" in printed
        assert "predicted, not measured" in printed
        assert "for all runs" in printed
    assert main(["run", *rest, "--gpu", "A5000"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert main(["run", *rest, "--dry-run", "--gpu", "A9"]) == 2
    assert "use one of A5000" in capsys.readouterr().err
