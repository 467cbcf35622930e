"""Workers that a server forks: the same results, and each ends alone; training is a stub in most tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oelm.config.overrides import override
from oelm.config.run_config import Machine
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.attempts import read_attempts
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slots import Slot, make_slots
from oelm.experiments.launch.warm import _wait, can_fork
from oelm.files.locks import process_alive
from oelm.runs.scan import scan
from waiting import wait_until

Start = Callable[..., "subprocess.Popen[str]"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked only on Linux")


def running(root: Path) -> list[tuple[int, int]]:
    """Return the pids of all workers that have done a step, and of their servers."""
    pids = [run.status.pid for run in scan(root) if run.state == "running" and run.status and run.status.step]
    return [(pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) for pid in pids]


def test_forked_workers_give_the_same_bits_as_new_processes(tmp_path: Path) -> None:
    configs = [override(experiment(id).at("smoke", 0), {"budget.steps": 2}) for id in ("GPT-01", "GPT-02")]
    found = []
    for warm in (True, False):
        launcher = LocalLauncher(make_slots(1, gpus="none"), Machine(), warm=warm)
        jobs = launcher.launch(make_jobs(configs if warm else configs[1:], tmp_path / str(warm)))
        assert {job.state for job in jobs} == {"finished"}, [job.reason for job in jobs]
        files = [jobs[-1].folder / name for name in ("results.json", "best/model.safetensors")]
        found.append([file.read_bytes() for file in files])
        pids = {run.id: run.status.pid for run in scan(tmp_path / str(warm)) if run.status}
        assert len(set(pids.values())) == len(jobs)
    assert found[0] == found[1]


def test_a_killed_server_ends_its_worker_and_the_run_goes_on_in_another(
    start_oelm: Start, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    process = start_oelm("GOOD-1", STUB_STEP_SECONDS="0.2")
    wait_until(lambda: bool(running(root)))
    ((worker, server),) = running(root)
    os.kill(server, signal.SIGTERM)  # as a cluster sends to all processes; the launcher decides
    os.kill(server, signal.SIGKILL)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert not process_alive(worker)
    (run,) = scan(root)
    assert [a.reason for a in read_attempts(run.path)] == ["killed by SIGKILL", ""]
    assert run.state == "finished"
    assert not list(root.rglob("TWO AT ONCE"))


def test_a_worker_outlives_its_killed_launcher_and_leaves_no_server(
    start_oelm: Start, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    process = start_oelm("GOOD-1", STUB_STEP_SECONDS="0.1")
    wait_until(lambda: bool(running(root)))
    ((worker, server),) = running(root)
    assert os.getsid(worker) == worker
    process.kill()
    process.communicate()
    wait_until(lambda: not process_alive(worker) and not process_alive(server))
    assert {run.state for run in scan(root)} == {"finished"}


def test_a_launcher_that_is_killed_before_it_reads_an_answer_ends_no_worker() -> None:
    launcher, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = subprocess.Popen([sys.executable, "-c", "import sys, time; time.sleep(0.5); sys.exit(3)"])
    server.send(b"started")
    launcher.close()  # with an unread answer, which resets the connection
    assert _wait(worker.pid, server) == 3


def test_each_run_prints_to_its_own_console(start_oelm: Start, tmp_path: Path) -> None:
    process = start_oelm("CRASHES-1", "BROKEN-1", "GOOD-1", "--slots", "1", "--retries", "0")
    process.communicate(timeout=300)
    consoles = {
        run.id: (run.path / "console.log").read_text(encoding="utf-8") for run in scan(tmp_path / "runs")
    }
    assert "device lost" in consoles["CRASHES-1"]
    assert "label -1" in consoles["BROKEN-1"]
    assert "device lost" not in consoles["BROKEN-1"]
    assert consoles["GOOD-1"] == ""


def test_runs_on_gpus_or_of_several_processes_are_not_forked() -> None:
    assert can_fork(Slot("cpu 0"))
    assert not can_fork(Slot("gpu 0", {"CUDA_VISIBLE_DEVICES": "0"}))
    assert not can_fork(Slot("cpu 0", processes=2))
