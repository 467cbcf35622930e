"""Through a real queue: Debian's SLURM where it can be started, submitit's own processes elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_node
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.cli.main import main
from oelm.config.overrides import override
from oelm.config.run_config import Machine
from oelm.errors import UsageError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.attempts import read_attempts
from oelm.experiments.launch.jobs import Job, make_jobs
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slots import make_slots
from oelm.experiments.launch.slurm import SlurmLauncher, SlurmOptions
from oelm.files.atomic import write_json
from oelm.runs.folder import run_path
from oelm.runs.scan import RunInfo, scan
from oelm.runs.slurm_queue import JOB_ID, job_of

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
    jobs = SlurmLauncher(root, options, Machine()).launch(make_jobs(configs, root))
    logs = "\n".join(p.read_text(errors="replace")[-800:] for p in root.rglob("*.err"))
    assert [job.state for job in jobs] == ["finished", "finished"], logs
    for run in scan(root):
        codes = [a.exit_code for a in read_attempts(run.path)]
        assert codes[0] == 75, logs  # it was stopped by the limit ...
        assert "time limit of the SLURM job" in read_attempts(run.path)[0].reason
        assert codes[-1] == 0  # ... and went on to its end
        assert (run.path / "slurm.out").resolve().is_file()
        assert not (run.path / "TWO AT ONCE").exists()
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    undisturbed = tmp_path / "undisturbed"
    LocalLauncher(make_slots(2, gpus="none"), Machine()).launch(make_jobs(configs, undisturbed))
    for config in configs:
        both = [json.loads((run_path(r, config) / "results.json").read_text()) for r in (root, undisturbed)]
        assert both[0] == both[1]


@pytest.mark.slow
def test_a_job_put_back_into_the_queue_shows_as_queued(
    slurm: dict[str, str],
    stub_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in {**stub_environment, **slurm, "STUB_STEP_SECONDS": "1"}.items():
        monkeypatch.setenv(name, value)
    root = tmp_path / "runs"
    config = override(experiment("GPT-01").at("smoke", 0), {"budget.steps": 600})
    options = SlurmOptions(partition="main", time_limit=3600, cpus=1, gpus_per_run=0)
    (job,) = SlurmLauncher(root, options, Machine(), wait=False).launch(make_jobs([config], root))

    def wait_for(state: str) -> RunInfo:
        deadline = time.monotonic() + 90
        while (run := scan(root)[0]).state != state:
            assert time.monotonic() < deadline, (run.state, run.reason)
            time.sleep(0.5)
        return run

    wait_for("running")
    subprocess.run(["scontrol", "requeue", job_of(job.folder)], check=True)
    assert "SLURM job" in wait_for("queued").reason
    assert all("requeued or cancelled by SLURM" in a.reason for a in read_attempts(job.folder))
    subprocess.run(["scancel", job_of(job.folder)], check=True)


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


@pytest.mark.parametrize("option", ["partition", "account", "qos", "gres", "constraint"])
def test_what_is_not_a_value_of_sbatch_never_reaches_the_script(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "GPT-01", "--scale", "smoke", "--on", "slurm", "--dry-run", "--runs", str(tmp_path / "r")]
    assert main([*words, f"--{option}", "x\nrm -rf ~"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"--{option} 'x\\nrm -rf ~': allowed are" in printed.err
    for value in ("a b", "x;reboot", "$(id)", "`id`", "x'", 'x"', "\x1b[2J", "x#", "é"):
        with pytest.raises(UsageError, match="allowed are"):
            SlurmOptions(**{option: value})


def test_a_runs_folder_with_a_line_break_never_reaches_the_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="control characters"):
        SlurmLauncher(tmp_path / "runs\nrm -rf ~", SlurmOptions(), Machine())


def shell_words(options: SlurmOptions) -> tuple[str, list[str]]:
    """The sbatch script, and what of it is not a comment to the shell."""
    script = SlurmLauncher("/runs", options, Machine()).script(1)
    return script, shlex.split(script, comments=True)


@settings(max_examples=30)
@given(st.text(st.characters(codec="ascii") | st.sampled_from("&|[]()*,:=/\n"), min_size=1, max_size=20))
def test_every_accepted_value_stays_one_line_of_the_script(value: str) -> None:
    expected = shell_words(SlurmOptions())[1]
    for option in ("partition", "constraint", "gres"):
        with contextlib.suppress(UsageError):
            script, words = shell_words(SlurmOptions(**{option: value}))
            assert words == expected
            lines = [line for line in script.splitlines() if line.startswith(f"#SBATCH --{option}=")]
            assert [shlex.split(line.partition("=")[2]) for line in lines] == [[value]]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `squeue` that prints the file returned."""
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec cat '{tmp_path / 'queue'}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path / "queue"


def submitted(root: Path, **changes: object) -> Job:
    """A run of the SLURM job 12_0 that was seen at work on a node."""
    (job,) = make_jobs([experiment("GPT-01").at("smoke", 0)], root)
    (job.folder / JOB_ID).write_text("12_0\n")
    status = {"host": "node7", "pid": 1, "heartbeat": time.time(), "step": 5, "total_steps": 9}
    write_json(job.folder / "status.json", {**status, "eta_seconds": 60, **changes})
    return job


@pytest.mark.parametrize("state", ["running", "interrupted"])
def test_a_requeued_run_shows_as_queued_without_an_eta(
    state: str, squeue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submitted(tmp_path / "runs", state=state)
    squeue.write_text("12_0 34 PENDING\n")
    assert main(["status", "--runs", str(tmp_path / "runs")]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "queued" in line
    assert "1m 00s" not in line
    assert "SLURM job 12_0: pending" in line
    # and so on the board of `oelm run`, which had seen it running
    launcher = SlurmLauncher(tmp_path / "runs", SlurmOptions(), Machine())
    job.state = "running"
    launcher._update(job)
    assert job.state == "queued"
    squeue.write_text("12_0 34 RUNNING\n")
    launcher._asked = float("-inf")
    (run,) = scan(tmp_path / "runs")
    assert run.state == state
    if state == "running":
        launcher._update(job)
        assert job.state == "running"


def test_without_a_queue_the_heartbeat_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    submitted(tmp_path / "runs", state="running", heartbeat=time.time() - 3600)
    (run,) = scan(tmp_path / "runs")
    assert run.state == "stalled"
    assert run.reason == "no heartbeat for 60 min: its SLURM job hangs, or was requeued"


@pytest.mark.parametrize("content", ["$(reboot)", "12_0; rm", "x" * 10_000, ""])
def test_only_a_job_number_is_looked_up(content: str, tmp_path: Path) -> None:
    (tmp_path / JOB_ID).write_text(content)
    assert job_of(tmp_path) == ""


def test_submitit_without_a_queue(
    tmp_path: Path, own_catalogue: Path, stub_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, stub_environment[name])
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    configs = [experiment(id).at("smoke", 0) for id in ("GPT-01", "GPT-02")]
    root = tmp_path / "runs"
    launcher = SlurmLauncher(root, SlurmOptions(cpus=1), Machine(), cluster="local")
    jobs = launcher.launch(make_jobs(configs, root))
    assert [job.state for job in jobs] == ["finished", "finished"]
    assert launcher.launch(make_jobs(configs, root))[0].state == "finished"  # and nothing is submitted twice
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
        (job,) = launcher.launch(make_jobs([config], root, retry_diverged=again))
        assert job.state == "diverged"
        tries.append(len(read_attempts(job.folder)))
    assert tries == [1, 1, 2]


def test_without_sbatch_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code = main(["run", "GPT-01", "--scale", "smoke", "--on", "slurm", "--runs", str(tmp_path / "runs")])
    assert code == 1
    assert "sbatch" in capsys.readouterr().err
