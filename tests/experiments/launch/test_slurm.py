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
from typing import Any

import psutil
import pytest
import slurm_node
import submitit
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.cli.main import main
from oelm.cli.slurm import SlurmFlags
from oelm.config.overrides import override
from oelm.config.run_config import Machine
from oelm.errors import UsageError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.attempts import read_attempts
from oelm.experiments.launch.jobs import Job, make_jobs
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slots import make_slots
from oelm.experiments.launch.slurm import SlurmLauncher
from oelm.experiments.launch.slurm_options import SlurmOptions
from oelm.files.atomic import write_json
from oelm.runs.layout import run_path
from oelm.runs.scan import RunInfo, scan
from oelm.runs.slurm_queue import JOB_ID, job_of
from waiting import wait_until

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
        assert codes[0] == 75, logs  # stopped by the time limit
        assert "time limit of the SLURM job" in read_attempts(run.path)[0].reason
        assert codes[-1] == 0  # resumed and finished
        assert (run.path / "slurm.out").resolve().is_file()
        assert not (run.path / "TWO AT ONCE").exists()
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    undisturbed = tmp_path / "undisturbed"
    LocalLauncher(make_slots(2, gpus="none"), Machine()).launch(make_jobs(configs, undisturbed))
    for config in configs:
        both = [
            json.loads((run_path(r, config) / "results.json").read_text(encoding="utf-8"))
            for r in (root, undisturbed)
        ]
        assert both[0] == both[1]


@pytest.mark.slow
def test_a_requeued_slurm_job_shows_as_queued(
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
def test_a_crashing_run_is_resubmitted_a_bounded_number_of_times_and_a_wrong_one_never(
    start_oelm: Start, slurm: dict[str, str], tmp_path: Path
) -> None:
    words = (
        "BROKEN-1",
        "CRASHES-1",
        "GOOD-1",
        "--on",
        "slurm",
        "--cpus",
        "1",
        "--time",
        "5m",
        "--retries",
        "1",
    )
    process = start_oelm(*words, STUB_STEP_SECONDS="0", **slurm)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1, output
    runs = {run.id: run for run in scan(tmp_path / "runs")}
    assert {id: (run.state, len(read_attempts(run.path))) for id, run in runs.items()} == {
        "BROKEN-1": ("failed", 1),
        "CRASHES-1": ("failed", 2),
        "GOOD-1": ("finished", 1),
    }
    assert "label -1 in row 7" in output


@pytest.mark.slow
def test_a_job_that_sbatch_refuses_is_an_error_with_its_message(
    start_oelm: Start, slurm: dict[str, str]
) -> None:
    process = start_oelm("GOOD-1", "GOOD-2", "--on", "slurm", "--partition", "nowhere", **slurm)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1, output
    assert "sbatch rejected the jobs" in output
    assert "partition" in output
    assert "Traceback" not in output


DECIDE = ("NOISY-WORSE", "--rules", "target", "--on", "slurm", "--cpus", "1", "--time", "5m")


@pytest.mark.slow
def test_decide_through_slurm_goes_on_after_sigkill(
    start_oelm: Start, slurm: dict[str, str], tmp_path: Path
) -> None:
    """Its SLURM jobs survive the kill, so the second command waits for them and repeats none."""
    first = start_oelm(*DECIDE, name="decide", STUB_STEP_SECONDS="3", **slurm)
    wait_until(lambda: any(run.state == "running" for run in scan(tmp_path / "runs")) or first.poll())
    first.kill()
    first.wait()
    again = start_oelm(*DECIDE, name="decide", STUB_STEP_SECONDS="0", **slurm)
    output = again.communicate(timeout=300)[0]
    assert again.returncode == 0, output
    assert "target: missed, stopped at n = 3 by the sequential rule" in output
    runs = scan(tmp_path / "runs")
    assert sorted((run.id, run.seed, run.state) for run in runs) == [
        (id, seed, "finished") for id in ("NOISY-BASE", "NOISY-WORSE") for seed in (0, 1, 2)
    ]
    assert all(len(read_attempts(run.path)) <= 1 for run in runs)
    assert not list((tmp_path / "runs").rglob("TWO AT ONCE"))


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
def test_an_invalid_sbatch_value_never_reaches_the_script(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "GPT-01", "--scale", "smoke", "--on", "slurm", "--dry-run", "--runs", str(tmp_path / "r")]
    assert main([*words, f"--{option}", "x\nrm -rf ~"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"--{option} 'x\\nrm -rf ~' has a character that is not allowed" in printed.err
    for value in ("a b", "x;reboot", "$(id)", "`id`", "x'", 'x"', "\x1b[2J", "x#", "é"):
        with pytest.raises(UsageError, match="allowed are"):
            SlurmOptions(**{option: value})


DRY = ["run", "GPT-01", "--scale", "smoke", "--on", "slurm", "--dry-run"]


def dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*DRY, "--runs", str(tmp_path / "r"), *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_script_of_a_run_on_several_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--nodes",
        "3",
        "--gpus-per-run",
        "4",
        "--setup",
        "module load cuda",
        "--setup",
        ". venv/bin/activate",
    )
    script = dry_run(tmp_path, capsys, *words, "--sbatch", "mail-type=END", "--sbatch", "exclusive")
    for line in ("nodes=3", "ntasks-per-node=1", "gres=gpu:4", "mail-type=END", "exclusive"):
        assert f"#SBATCH --{line}\n" in script
    assert "\n# setup\nmodule load cuda\n. venv/bin/activate\n\n# command\n" in script
    assert "srun" in (command := script.splitlines()[-1])
    assert "--kill-on-bad-exit=1" in command
    assert "--kill-on-bad-exit" not in dry_run(tmp_path, capsys)  # one node


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sbatch", "comment=x\nreboot"], "allowed are letters"),
        (["--sbatch", "comment=$(reboot)"], "allowed are letters"),
        (["--sbatch", "comment='x'"], "allowed are letters"),
        (["--sbatch", "x\nreboot=1"], "long name of an sbatch option"),
        (["--sbatch", "p=x"], "long name of an sbatch option"),
        (["--sbatch", "time=5"], "use --time"),
        (["--sbatch", "cpus_per_task=5"], "use --cpus"),
        (["--sbatch", "array=0-9"], "oelm sets this option itself"),
        (["--sbatch", "wrap=reboot"], "oelm sets this option itself"),
        (["--setup", "module load x\nreboot"], "one command per --setup"),
        (["--nodes", "0"], "--nodes"),
        (["--time", "5s"], "at least one minute"),
    ],
)
def test_further_options_are_checked(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DRY, "--runs", str(tmp_path / "r"), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_the_gpus_of_a_site_profile_do_not_overrule_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site.yaml").write_text("gres: gpu:a100:1\n", encoding="utf-8")
    monkeypatch.setenv("OELM_SITE", str(tmp_path / "site.yaml"))
    assert SlurmFlags().options(1).parameters()["gres"] == "gpu:a100:1"
    assert "gres" not in {name for name, value in SlurmFlags().options(0).parameters().items() if value}
    with pytest.raises(UsageError, match="give a matching --gres"):
        SlurmFlags().options(4)
    assert SlurmFlags(gres="gpu:a100:4").options(4).parameters()["gres"] == "gpu:a100:4"


def test_a_site_profile_holds_the_options_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "oelm").mkdir(parents=True)
    home = tmp_path / "config" / "oelm" / "site.yaml"
    home.write_text(
        "partition: gpu\naccount: lab\ntime: 8h\ncpus: 16\nsetup: [module load cuda]\n"
        "sbatch: {mail-type: END, exclusive: true}\n",
        encoding="utf-8",
    )
    script = dry_run(tmp_path, capsys, "--account", "other", "--cpus", "4", "--setup", "echo hi")
    assert f"site profile: {home}" in script
    expected = ("partition=gpu", "account=other", "time=480", "cpus-per-task=4", "mail-type=END", "exclusive")
    for line in expected:
        assert f"#SBATCH --{line}\n" in script
    assert "module load cuda\necho hi\n" in script
    # a file here wins over that of the home folder, and OELM_SITE over both
    (tmp_path / "oelm-site.yaml").write_text("partition: here\n", encoding="utf-8")
    assert "--partition=here" in dry_run(tmp_path, capsys)
    wrong = tmp_path / "wrong.yaml"
    monkeypatch.setenv("OELM_SITE", str(wrong))
    for text, message in (
        ("partition: gpu\npartion: x\n", "wrong.yaml, line 2: unknown field 'partion'; did you mean"),
        ("partition: [a]\n", "wrong.yaml, line 1: partition: expected text"),
        ("account: 'x; reboot'\n", "--account 'x; reboot' has a character"),
        ("sbatch: {comment: 'a$b'}\n", "allowed are"),
        (None, "does not exist; correct the environment variable OELM_SITE"),
    ):
        wrong.unlink(missing_ok=True)
        if text is not None:
            wrong.write_text(text, encoding="utf-8")
        assert main([*DRY, "--runs", str(tmp_path / "r")]) == 2
        assert message in capsys.readouterr().err


def test_a_runs_folder_with_a_line_break_never_reaches_the_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="control characters"):
        SlurmLauncher(tmp_path / "runs\nrm -rf ~", SlurmOptions(), Machine())


def shell_words(options: SlurmOptions) -> tuple[str, list[str]]:
    """The sbatch script, and its shell words without comments."""
    script = SlurmLauncher("/runs", options, Machine()).script(1)
    return script, shlex.split(script, comments=True)


@settings(max_examples=30)
@given(st.text(st.characters(codec="ascii") | st.sampled_from("&|[]()*,:=/\n"), min_size=1, max_size=20))
def test_every_accepted_value_stays_one_line_of_the_script(value: str) -> None:
    expected = shell_words(SlurmOptions())[1]
    for option in ("partition", "constraint", "gres", "comment"):
        with contextlib.suppress(UsageError):
            given: dict[str, Any] = {"sbatch": {option: value}} if option == "comment" else {option: value}
            script, words = shell_words(SlurmOptions(**given))
            assert words == expected
            lines = [line for line in script.splitlines() if line.startswith(f"#SBATCH --{option}=")]
            assert [shlex.split(line.partition("=")[2]) for line in lines] == [[value]]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `squeue` that prints the file returned."""
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec cat '{tmp_path / 'queue'}'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path / "queue"


def submitted(root: Path, **changes: object) -> Job:
    """A run of the SLURM job 12_0 that has already trained on a node."""
    (job,) = make_jobs([experiment("GPT-01").at("smoke", 0)], root)
    (job.folder / JOB_ID).write_text("12_0\n", encoding="utf-8")
    status = {"host": "node7", "pid": 1, "heartbeat": time.time(), "step": 5, "total_steps": 9}
    write_json(job.folder / "status.json", {**status, "eta_seconds": 60, **changes})
    return job


@pytest.mark.parametrize("state", ["running", "interrupted"])
def test_a_requeued_run_shows_as_queued_without_an_eta(
    state: str, squeue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submitted(tmp_path / "runs", state=state)
    squeue.write_text("12_0 34 PENDING\n", encoding="utf-8")
    assert main(["status", "--runs", str(tmp_path / "runs")]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "queued" in line
    assert "1m 00s" not in line
    assert "SLURM job 12_0: pending" in line
    # the launcher of `oelm run` shows the same
    launcher = SlurmLauncher(tmp_path / "runs", SlurmOptions(), Machine())
    job.state = "running"
    launcher._update(job)
    assert job.state == "queued"
    squeue.write_text("12_0 34 RUNNING\n", encoding="utf-8")
    launcher._asked = float("-inf")
    (run,) = scan(tmp_path / "runs")
    assert run.state == state
    if state == "running":
        launcher._update(job)
        assert job.state == "running"


def test_without_squeue_an_old_heartbeat_shows_as_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    submitted(tmp_path / "runs", state="running", heartbeat=time.time() - 3600)
    (run,) = scan(tmp_path / "runs")
    assert run.state == "stalled"
    assert run.reason == "no heartbeat for 60 min: the SLURM job hangs or was requeued"


@pytest.mark.parametrize("content", ["$(reboot)", "12_0; rm", "x" * 10_000, ""])
def test_a_file_without_a_valid_job_number_is_ignored(content: str, tmp_path: Path) -> None:
    (tmp_path / JOB_ID).write_text(content, encoding="utf-8")
    assert job_of(tmp_path) == ""


class WithoutSlurm(SlurmLauncher):
    """submitit starts the tasks as processes of this machine; the queue lists those that are alive."""

    poll_seconds = 0.2

    def _executor(self) -> Any:
        return submitit.LocalExecutor(folder=str(self.root / ".slurm" / "%j"))

    def _queue(self) -> dict[str, str]:
        alive = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since the list was made
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive[str(process.pid)] = "RUNNING"
        return alive


def test_submitit_runs_jobs_without_slurm(
    tmp_path: Path, own_catalogue: Path, stub_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, stub_environment[name])
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    configs = [experiment(id).at("smoke", 0) for id in ("GPT-01", "GPT-02")]
    root = tmp_path / "runs"
    launcher = WithoutSlurm(root, SlurmOptions(cpus=1), Machine())
    jobs = launcher.launch(make_jobs(configs, root))
    assert [job.state for job in jobs] == ["finished", "finished"]
    assert launcher.launch(make_jobs(configs, root))[0].state == "finished"  # nothing is submitted twice
    assert len(list((root / ".slurm").rglob("*_submitted.pkl"))) == 2


class Killed(BaseException):
    """Stands for SIGKILL: no code of the package handles it."""


class KilledAfterSubmitting(WithoutSlurm):
    def _watch(self, jobs: Any, waiting: Any) -> None:
        raise Killed


def test_decide_through_a_queue_goes_on_after_a_kill(
    run_oelm: Callable[..., tuple[int, str]],
    tmp_path: Path,
    stub_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, stub_environment[name])
    monkeypatch.setattr("oelm.cli.run.require_sbatch", lambda: None)
    monkeypatch.setattr("oelm.cli.run.SlurmLauncher", KilledAfterSubmitting)
    with pytest.raises(Killed):
        run_oelm(*DECIDE, command="decide")
    monkeypatch.setattr("oelm.cli.run.SlurmLauncher", WithoutSlurm)
    code, output = run_oelm(*DECIDE, command="decide")
    assert code == 0, output
    assert "target: missed, stopped at n = 3 by the sequential rule" in output
    assert len(list((tmp_path / "runs" / ".slurm").rglob("*_submitted.pkl"))) == 6  # none is submitted twice
    assert not list((tmp_path / "runs").rglob("TWO AT ONCE"))


def test_diverged_runs_are_resubmitted_only_with_the_flag(
    tmp_path: Path, stub_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, stub_environment[name])
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    config = override(experiment("GPT-01").at("smoke", 0), {"optim.lr": 2.0})  # the stub diverges above 1
    root = tmp_path / "runs"
    launcher = WithoutSlurm(root, SlurmOptions(cpus=1), Machine())
    for again, tries in ((False, 1), (False, 1), (True, 2)):
        (job,) = launcher.launch(make_jobs([config], root, retry_diverged=again))
        assert job.state == "diverged"
        # The job writes its attempt after the state that the launcher waits for.
        wait_until(lambda folder=job.folder, n=tries: len(read_attempts(folder)) >= n)
        assert len(read_attempts(job.folder)) == tries


@pytest.mark.parametrize("command", ["run", "decide"])
def test_without_sbatch_the_error_says_so_and_no_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code = main([command, "GPT-02", "--scale", "smoke", "--on", "slurm", "--runs", str(tmp_path / "runs")])
    assert code == 2
    assert "needs the command `sbatch`" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
