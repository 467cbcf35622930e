"""Phases of the study from start to results with real training, also when processes are killed midway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.config.overrides import override
from oelm.config.run_config import Machine
from oelm.experiments.catalogue import experiment, select
from oelm.experiments.launch.attempts import read_attempts
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.worker import machine_to_json
from oelm.runs.folder import RunFolder
from oelm.runs.scan import scan

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.Popen[str]]:
    """`oelm run ...` at smoke scale, with a cache shared by the tests of this session and no hub."""
    cache = tmp_path_factory.getbasetemp() / "oelm-cache"
    environment = {**os.environ, "OELM_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("OELM_DATA_DIR", None)

    def run(*words: str, root: Path = tmp_path / "runs") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "oelm.cli.main", "run", *words, "--scale", "smoke", "--gpus", "none"]
        return subprocess.Popen(
            [*command, "--runs", str(root)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    output = process.communicate(timeout=400)[0]
    assert process.returncode == code, output
    return output


def test_a_phase_of_the_study_in_processes(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    check_phase(2, tmp_path / "runs", ended(start("--phase", "2")))


@pytest.mark.parametrize("phase", [1, 3, 4])
def test_a_phase_of_the_study_from_start_to_results(
    in_process: None,
    tmp_path: Path,
    phase: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["oelm", "run", "--phase", str(phase), "--scale", "smoke", "--runs", str(tmp_path / "runs")]
    words += ["--cache-dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", words)  # what the manifests name
    assert main(words[1:]) == 0
    check_phase(phase, tmp_path / "runs", capsys.readouterr().out)


def check_phase(phase: int, root: Path, output: str) -> None:
    runs = {run.id: run for run in scan(root)}
    assert set(runs) == {e.id for e in select(phases=[phase])}
    assert {run.state for run in runs.values()} == {"finished"}
    for id, run in runs.items():
        folder = RunFolder(run.path)
        results, audit, manifest = folder.results(), folder.freeze_audit(), folder.manifest()
        assert results is not None
        assert audit is not None
        assert manifest is not None
        assert results["test"] is not None, id
        assert results["metric"] == ("ppl" if phase in (2, 3) else "accuracy")
        assert (results["parameters"]["frozen"] > 0) == (results["arm"] != "baseline")
        assert all(part["ok"] for part in audit.values() if isinstance(part, dict) and "ok" in part)
        assert "--phase" in manifest["command"]  # the command a person can type again
        assert "built-in" in manifest["data"]["origin"]
    assert "as the original study published it" in output


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killing_launcher_and_worker_ends_with_the_same_results(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    words = ("GPT-CLS-02", "--set", "budget.steps=80", "--set", "budget.eval_every=10")
    quiet, rough = tmp_path / "quiet", tmp_path / "rough"
    ended(start(*words, root=quiet))

    launcher = start(*words, root=rough)
    wait_for(lambda: any(run.status and run.status.step > 10 for run in scan(rough)))
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate(timeout=300)
    alive = [run.status.pid for run in scan(rough) if run.state == "running" and run.status]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(run.state != "running" for run in scan(rough)))
    ended(start(*words, root=rough))

    for run in scan(quiet):
        other = rough / run.path.relative_to(quiet)
        for name in ("results.json", "metrics.jsonl"):
            assert (run.path / name).read_bytes() == (other / name).read_bytes(), f"{run.name} {name}"
    if alive:
        assert any(json.loads((r.path / "status.json").read_text())["attempt"] > 1 for r in scan(rough))


def test_a_tuned_experiment_gets_its_trials_first(
    in_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "TS-FREEZE-TUNED", "--seeds", "0", "--trial-seeds", "0", "--scale", "smoke"]
    assert main([*words, "--runs", str(tmp_path / "runs"), "--cache-dir", str(tmp_path / "cache")]) == 0
    output = capsys.readouterr().out
    assert "tuned TS-FREEZE-TUNED: learning rate" in output
    assert "unequal" not in output
    finals = [run for run in scan(tmp_path / "runs") if not run.trial]
    assert {run.state for run in finals} == {"finished"}
    for run in finals:
        config = RunFolder(run.path).config()
        assert config.tune.grid == (1e-3, 4e-3)
        assert config.optim.lr in config.tune.grid
    for run in scan(tmp_path / "runs"):
        if run.trial:
            results = RunFolder(run.path).results()
            assert results is not None
            assert results["test"] is None


def test_one_run_over_two_processes_stops_and_goes_on(tmp_path: Path) -> None:
    """What `--gpus-per-run 2` starts, here on CPU: torchrun below a worker that holds the lock."""
    changes = {"budget.steps": 200, "budget.eval_every": 50}
    (job,) = make_jobs([override(experiment("GPT-02").at("smoke", 0), changes)], tmp_path / "runs")
    folder = RunFolder(job.folder)
    machine = machine_to_json(Machine(cache_dir=str(tmp_path / "cache"), device="cpu"))
    command = [sys.executable, "-m", "oelm.experiments.launch.worker", str(job.folder), "--machine", machine]
    process = subprocess.Popen([*command, "--processes", "2"], stderr=subprocess.DEVNULL)
    wait_for(lambda: (status := folder.status()) and status.step > 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 75
    done = subprocess.run([*command, "--processes", "2"], stderr=subprocess.DEVNULL, timeout=300, check=False)
    assert done.returncode == 0
    assert [a.exit_code for a in read_attempts(job.folder)] == [75, 0]
    steps = [row["step"] for row in folder.metrics("train")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 200
