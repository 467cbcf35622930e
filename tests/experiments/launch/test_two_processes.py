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
from oelm.runs.lock import RunLock
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
@pytest.mark.usefixtures("one_core")
def test_two_processes_use_loopback_and_end_on_a_busy_core(tmp_path: Path) -> None:
    """Six ranks of three runs share one core, where ranks once hung when their run ended."""
    endless = {"budget.steps": 100_000, "budget.eval_every": 50_000}
    changes = {"finished": {}, "diverged": {"optim.lr": 1e30}, "interrupted": endless}
    folders = {state: claim(tmp_path / state, **changes[state]) for state in changes}
    processes = {
        state: subprocess.Popen(worker(folder), stderr=subprocess.PIPE, text=True)
        for state, folder in folders.items()
    }
    wait_until(lambda: (status := folders["interrupted"].status()) is not None and status.step > 10)
    ranks = psutil.Process(processes["interrupted"].pid).children(recursive=True)
    assert len(ranks) == 2
    listening = [c.laddr.ip for p in ranks for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}
    processes["interrupted"].send_signal(signal.SIGTERM)
    printed = {state: process.communicate(timeout=600)[1] for state, process in processes.items()}
    states = {state: status.state if (status := f.status()) else "" for state, f in folders.items()}
    assert states == {state: state for state in changes}, printed
    codes = {state: process.returncode for state, process in processes.items()}
    assert codes == {"finished": 0, "diverged": 76, "interrupted": 75}, printed
    assert [attempt.exit_code for attempt in read_attempts(folders["interrupted"].path)] == [75]
    assert folders["interrupted"].latest.exists()


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
