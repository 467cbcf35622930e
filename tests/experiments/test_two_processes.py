"""Real runs over two processes on CPU: what they listen on, and how they end beside load and under kills."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from oelm.config.overrides import override
from oelm.config.run_config import Machine
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.worker import machine_to_json
from oelm.runs.folder import RunFolder
from oelm.runs.lock import RunLock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def claim(root: Path, **changes: Any) -> RunFolder:
    changes = {"budget.steps": 4, "budget.eval_every": 2, **changes}
    (job,) = make_jobs([override(experiment("GPT-02").at("smoke", 0), changes)], root)
    return RunFolder(job.folder)


def worker(folder: RunFolder, cache: Path, **machine: Any) -> list[str]:
    """What `--gpus-per-run 2` starts, here on CPU."""
    words = machine_to_json(
        Machine(cache_dir=str(cache), device="cpu", threads=1, gemm_peak=False, **machine)
    )
    command = [sys.executable, "-m", "oelm.experiments.launch.worker", str(folder.path)]
    return [*command, "--machine", words, "--processes", "2"]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def running(folder: RunFolder, step: int) -> bool:
    status = folder.status()
    return status is not None and status.state == "running" and status.step >= step


def test_ranks_listen_on_loopback_die_with_their_worker_and_the_next_one_goes_on(
    tmp_path: Path, cache: Path
) -> None:
    steps = {"budget.steps": 100_000, "budget.eval_every": 50_000, "budget.checkpoint_every": 5}
    folder = claim(tmp_path, **steps)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed worker cannot remove its private folder
    process = subprocess.Popen(worker(folder, cache), stderr=subprocess.DEVNULL, env=environment)
    try:
        wait_until(lambda: running(folder, 20) and folder.latest.exists())
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) == 2
        listening = [c.laddr.ip for p in ranks for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1"}
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks))
    again = subprocess.run(
        worker(folder, cache, time_limit=1e-6), stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert again.returncode == 75, again.stderr
    status = folder.status()
    assert status is not None
    assert (status.state, status.resumes) == ("interrupted", 1)
    rows = [row["step"] for row in folder.metrics("train")]
    assert rows == sorted(set(rows))


def test_a_second_torchrun_on_one_folder_is_refused(tmp_path: Path, cache: Path) -> None:
    folder = claim(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "oelm", "train", "GPT-02", "--scale", "smoke", "--seed", "0", "--runs", str(tmp_path)]
    words += ["--set", "budget.steps=4", "--set", "budget.eval_every=2", "--device", "cpu"]
    with RunLock(folder.path):
        done = subprocess.run(
            [*torchrun, *words, "--cache-dir", str(cache)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 1
    assert f"is being worked on by process {os.getpid()} on" in done.stderr
    assert folder.status() is None
    assert not folder.metrics_file.exists()


@pytest.fixture
def load() -> Iterator[None]:
    """One core, shared with a busy process: this is where ranks once hung at their end."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        os.sched_setaffinity(0, {min(cores)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    busy.kill()
    busy.wait()
    if cores:
        os.sched_setaffinity(0, cores)


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize(
    ("state", "code", "lr", "limit"),
    [("finished", 0, 1e-3, 0.0), ("interrupted", 75, 1e-3, 1e-6), ("diverged", 76, 1e30, 0.0)],
)
def test_two_processes_end_beside_load(
    tmp_path: Path, cache: Path, state: str, code: int, lr: float, limit: float
) -> None:
    folder = claim(tmp_path, **{"optim.lr": lr})
    done = subprocess.run(
        worker(folder, cache, time_limit=limit), capture_output=True, text=True, timeout=300, check=False
    )
    status = folder.status()
    assert status is not None, done.stderr
    assert (status.state, done.returncode) == (state, code), done.stderr
