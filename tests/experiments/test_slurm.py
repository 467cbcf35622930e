"""Through a real queue: Debian's SLURM where it can be started, submitit's own processes elsewhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_node

from oelm.cli.main import main
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch import LocalLauncher, prepare
from oelm.experiments.overrides import override
from oelm.experiments.registry import scan
from oelm.experiments.slots import make_slots
from oelm.experiments.slurm import SlurmLauncher, SlurmOptions
from oelm.experiments.worker import attempts
from oelm.training.config import Machine
from oelm.training.folder import run_path

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    try:
        with slurm_node.one_node(tmp_path_factory.mktemp("slurm")) as environment:
            yield {name: environment[name] for name in ("SLURM_CONF", "PATH")}
    except slurm_node.NoSlurm as reason:
        pytest.skip(f"no SLURM here: {reason}")


@pytest.mark.slow
def test_runs_that_reach_their_time_limit_are_requeued_and_resume(
    slurm: dict[str, str],
    stub_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in {**stub_environment, **slurm, "STUB_STEP_SECONDS": "4"}.items():
        monkeypatch.setenv(name, value)
    configs = [override(experiment(id).at("smoke", 0), {"budget.steps": 12}) for id in ("GPT-01", "GPT-02")]
    root = tmp_path / "runs"
    # One minute, of which 50 s for the checkpoint: SLURM, which looks every 30 s, signals after 10 to 40 s.
    options = SlurmOptions(partition="main", time_limit=60, grace=50, cpus=1, gpus_per_run=0)
    jobs = SlurmLauncher(root, options, Machine()).launch(prepare(configs, root))
    logs = "\n".join(p.read_text(errors="replace")[-800:] for p in root.rglob("*.err"))
    assert [job.state for job in jobs] == ["finished", "finished"], logs
    for run in scan(root):
        codes = [a["exit_code"] for a in attempts(run.path)]
        assert codes[0] == 75, logs  # it was stopped by the limit ...
        assert codes[-1] == 0  # ... and went on to its end
        assert (run.path / "slurm.out").resolve().is_file()
        assert not (run.path / "TWO AT ONCE").exists()
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    undisturbed = tmp_path / "undisturbed"
    LocalLauncher(make_slots(2, gpus="none"), Machine()).launch(prepare(configs, undisturbed))
    for config in configs:
        both = [json.loads((run_path(r, config) / "results.json").read_text()) for r in (root, undisturbed)]
        assert both[0] == both[1]


@pytest.mark.slow
def test_a_failing_run_is_submitted_again_a_bounded_number_of_times(
    start_oelm: Start, slurm: dict[str, str], tmp_path: Path
) -> None:
    words = ("BROKEN-1", "GOOD-1", "--on", "slurm", "--cpus", "1", "--time", "5m", "--retries", "1")
    process = start_oelm(*words, STUB_STEP_SECONDS="0", **slurm)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1, output
    assert {run.id: run.state for run in scan(tmp_path / "runs")} == {
        "BROKEN-1": "failed",
        "GOOD-1": "finished",
    }
    assert "label -1 in row 7" in output


@pytest.mark.slow
def test_a_job_that_sbatch_refuses_is_an_error_with_its_words(
    start_oelm: Start, slurm: dict[str, str]
) -> None:
    process = start_oelm("GOOD-1", "GOOD-2", "--on", "slurm", "--partition", "nowhere", **slurm)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1, output
    assert "sbatch refused the jobs" in output
    assert "partition" in output
    assert "Traceback" not in output


def test_dry_run_prints_the_sbatch_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "GPT-01", "GPT-02", "--scale", "smoke", "--on", "slurm", "--dry-run", "--time", "3h"]
    words += [
        "--gpus-per-run",
        "2",
        "--runs",
        str(tmp_path / "runs"),
        "--partition",
        "gpu",
        "--account",
        "lab",
        "--gres",
        "gpu:a100:2",
        "--constraint",
        "a100",
    ]
    assert main(words) == 0
    script = capsys.readouterr().out
    expected = (
        "partition=gpu",
        "account=lab",
        "gres=gpu:a100:2",
        "constraint=a100",
        "time=180",
        "array=0-1%",
    )
    for words_of_script in (*expected, "requeue", "signal=USR2@120"):
        assert words_of_script in script, script
    assert not (tmp_path / "runs").exists()  # nothing was claimed, nothing was written


def test_submitit_without_a_queue(
    tmp_path: Path, own_catalogue: Path, stub_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, stub_environment[name])
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    configs = [experiment(id).at("smoke", 0) for id in ("GPT-01", "GPT-02")]
    root = tmp_path / "runs"
    launcher = SlurmLauncher(root, SlurmOptions(cpus=1), Machine(), cluster="local")
    jobs = launcher.launch(prepare(configs, root))
    assert [job.state for job in jobs] == ["finished", "finished"]
    assert launcher.launch(prepare(configs, root))[0].state == "finished"  # and nothing is submitted twice
    assert len(list((root / ".slurm").rglob("*_submitted.pkl"))) == 2


def test_diverged_runs_are_submitted_again_only_when_asked(
    tmp_path: Path, stub_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, stub_environment[name])
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    config = override(experiment("GPT-01").at("smoke", 0), {"optim.lr": 2.0})  # the stub's way to diverge
    root = tmp_path / "runs"
    launcher = SlurmLauncher(root, SlurmOptions(cpus=1), Machine(), cluster="local")
    tries = []
    for again in (False, False, True):
        (job,) = launcher.launch(prepare([config], root, again=again))
        assert job.state == "diverged"
        tries.append(len(attempts(job.folder)))
    assert tries == [1, 1, 2]


def test_without_sbatch_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code = main(["run", "GPT-01", "--scale", "smoke", "--on", "slurm", "--runs", str(tmp_path / "runs")])
    assert code == 1
    assert "sbatch" in capsys.readouterr().err
