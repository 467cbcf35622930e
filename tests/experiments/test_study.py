"""Studies with real training, from the command line to the results, also when processes are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.config.overrides import override
from oelm.config.run_config import Machine
from oelm.experiments.catalogue import experiment, select
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.worker import train_folder
from oelm.runs.folder import RunFolder
from oelm.runs.scan import scan
from waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("phase", [1, 2, 3, 4])
def test_a_phase_of_the_original_study_runs_to_its_results(
    in_process: None,
    tmp_path: Path,
    phase: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["oelm", "run", "--phase", str(phase), "--scale", "smoke", "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", words)  # recorded in the manifests
    assert main(words[1:]) == 0
    assert "as the original study published it" in capsys.readouterr().out
    runs = {run.id: run for run in scan(tmp_path / "runs")}
    assert set(runs) == {e.id for e in select(phases=[phase])}
    assert {run.state for run in runs.values()} == {"finished"}
    for id, run in runs.items():
        folder = RunFolder(run.path)
        results, audit, manifest = folder.results(), folder.freeze_audit(), folder.manifest()
        assert results is not None
        assert audit is not None
        assert manifest is not None
        assert results.test is not None, id
        assert results.metric == ("ppl" if phase in (2, 3) else "accuracy")
        assert (results.parameters.frozen > 0) == (results.arm != "baseline")
        assert audit.ok
        assert manifest.command.startswith("oelm run --phase")  # what a user can type again
        assert "built-in" in manifest.data.origin


def test_a_tuned_experiment_runs_its_trials_first(
    in_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "TS-FREEZE-TUNED", "--seeds", "0", "--scale", "smoke"]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 0
    output = capsys.readouterr().out
    assert "tuned TS-FREEZE-TUNED: learning rate" in output
    assert "unequal" not in output
    (final,) = [run for run in scan(tmp_path / "runs") if not run.trial]
    assert final.state == "finished"
    config = RunFolder(final.path).config()
    assert set(config.tune.grid) > {1e-3, 4e-3}  # of two values, the better one is at the edge
    assert config.optim.lr in config.tune.grid
    trials = [run for run in scan(tmp_path / "runs") if run.trial]
    assert {run.seed for run in trials} == {1000, 1001}
    for run in trials:
        results = RunFolder(run.path).results()
        assert results is not None
        assert results.test is None


def test_killing_launcher_and_worker_ends_with_the_same_results(tmp_path: Path) -> None:
    """`oelm run` in real processes, compared byte by byte with the same run in this process."""
    changes = {"budget.steps": 80, "budget.eval_every": 10}
    machine = Machine(device="cpu", threads=1)
    (job,) = make_jobs([override(experiment("GPT-CLS-02").at("smoke"), changes)], tmp_path / "undisturbed")
    assert train_folder(job.folder, machine) == 0

    root = tmp_path / "killed"
    words = ["run", "GPT-CLS-02", "--scale", "smoke", "--gpus", "none", "--threads", "1", "--runs", str(root)]
    words += [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    launcher = [sys.executable, "-m", "oelm.cli.main", *words]
    first = subprocess.Popen(launcher, stdout=subprocess.DEVNULL)
    wait_until(lambda: any(run.status and run.status.step > 10 for run in scan(root)))
    first.kill()
    first.wait()
    alive = [run.status.pid for run in scan(root) if run.state == "running" and run.status]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(run.state != "running" for run in scan(root)))
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    (run,) = scan(root)
    for name in ("results.json", "metrics.jsonl"):
        assert (run.path / name).read_bytes() == (job.folder / name).read_bytes(), name
    manifest = RunFolder(run.path).manifest()
    assert manifest is not None
    assert "run GPT-CLS-02 --scale smoke" in manifest.command
    if alive:
        assert run.status is not None
        assert run.status.attempt > 1


def test_an_experiment_that_cannot_learn_at_a_scale_is_left_out_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--scale", "mini", "--runs", str(tmp_path / "runs")]
    assert main(["run", "--study", "gpt-cls", "--dry-run", *runs]) == 0
    output = capsys.readouterr().out
    assert "note: not run at scale mini: CLS-XNLI-baseline" in output
    assert "no better than guessing" in output
    assert f"CLS-IMDB-baseline{os.sep}scale=mini" in output
    assert f"CLS-XNLI-baseline{os.sep}scale=mini" not in output
    assert main(["train", "CLS-MNLI-baseline", *runs]) == 2
    assert "not run at scale mini: CLS-MNLI-baseline (a small GPT" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
