"""Real runs over two processes on the CPU: their network ports, and how they end on a busy machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from oelm.cli.main import main
from oelm.config.overrides import override
from oelm.config.run_config import Machine
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.attempts import read_attempts
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.worker import worker_command
from oelm.runs.folder import RunFolder
from oelm.runs.lock import RunLock, is_held
from waiting import wait_until


def claim(root: Path, **changes: Any) -> RunFolder:
    changes = {"budget.steps": 4, "budget.eval_every": 2, **changes}
    (job,) = make_jobs([override(experiment("GPT-02").at("smoke", 0), changes)], root)
    return RunFolder(job.folder)


def worker(folder: RunFolder) -> list[str]:
    """The command that `--gpus-per-run 2` starts, here for the CPU."""
    return worker_command(folder.path, Machine(device="cpu", threads=1), "--processes", "2")


@pytest.fixture
def one_core() -> Iterator[None]:
    """Restrict this process and the processes that it starts to one core."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        os.sched_setaffinity(0, {min(cores)})
    yield
    if cores:
        os.sched_setaffinity(0, cores)


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")  # ranks that share one core once hung when their run was interrupted
def test_ranks_use_loopback_stop_with_a_checkpoint_resume_and_die_with_their_worker(tmp_path: Path) -> None:
    steps = {"budget.steps": 100_000, "budget.eval_every": 50_000, "budget.checkpoint_every": 5}
    folder = claim(tmp_path, **steps)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed worker cannot remove its private folder

    def start(resumes: int) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
        """A worker whose ranks have trained some steps."""
        before = folder.status()
        step = (before.step if before else 0) + 10
        process = subprocess.Popen(worker(folder), stderr=subprocess.DEVNULL, env=environment)

        def trains() -> bool:
            status = folder.status()
            return (
                status is not None
                and (status.state, status.resumes) == ("running", resumes)
                and status.step > step
            )

        wait_until(trains)
        return process, psutil.Process(process.pid).children(recursive=True)

    process, ranks = start(resumes=0)
    assert len(ranks) == 2
    listening = [c.laddr.ip for p in ranks for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 75
    assert [attempt.exit_code for attempt in read_attempts(folder.path)] == [75]

    process, ranks = start(resumes=1)
    process.kill()
    process.wait()
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks))
    wait_until(lambda: not is_held(folder.path))
    rows = [row.step for row in folder.metrics("train")]
    assert rows == sorted(set(rows))


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_two_processes_end_on_a_busy_core(tmp_path: Path) -> None:
    """Four ranks of two runs share one core, where ranks once hung when their run ended."""
    learning_rates = {"finished": 1e-3, "diverged": 1e30}
    folders = {name: claim(tmp_path / name, **{"optim.lr": lr}) for name, lr in learning_rates.items()}
    processes = {
        name: subprocess.Popen(worker(folder), stderr=subprocess.PIPE, text=True)
        for name, folder in folders.items()
    }
    printed = {name: process.communicate(timeout=600)[1] for name, process in processes.items()}
    states = {name: status.state if (status := f.status()) else "" for name, f in folders.items()}
    assert states == {name: name for name in learning_rates}, printed
    codes = {name: process.returncode for name, process in processes.items()}
    assert codes == {"finished": 0, "diverged": 76}, printed


def test_a_torchrun_is_refused_while_another_process_has_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 takes the lock for all ranks; torchrun ends the others when it fails."""
    folder = claim(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["train", "GPT-02", "--scale", "smoke", "--seed", "0", "--runs", str(tmp_path)]
    words += ["--set", "budget.steps=4", "--set", "budget.eval_every=2", "--device", "cpu"]
    with RunLock(folder.path):
        assert main(words) == 77
    assert f"is in use by process {os.getpid()} on" in capsys.readouterr().err
    assert folder.status() is None
    assert not folder.metrics_file.exists()
