"""How the ranks of one run end: exit codes, hangs, kills and the lock. Short scripts replace the training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oelm.experiments.launch import ranks as ranks_module
from oelm.experiments.launch.ranks import run_ranks
from oelm.files.locks import process_alive
from oelm.runs.folder import RunFolder
from oelm.runs.lock import RunLock, is_held
from oelm.runs.schema import Status
from waiting import wait_until

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
from oelm.experiments.launch.ranks import follow_parent
from oelm.runs.folder import RunFolder
from oelm.runs.schema import Status
rank, folder, private = int(os.environ["RANK"]), RunFolder(sys.argv[1]), Path(os.environ["OELM_RANK_DIR"])
def say(state, reason=""):
    if state == "finished":
        folder.results_file.write_text("{}", encoding="utf-8")
    folder.write_status(Status(state=state, reason=reason, attempt=1))
def report(reason):
    facts = {"time": time.time(), "rank": rank, "state": "failed", "reason": reason}
    (private / "part").write_text(json.dumps(facts), encoding="utf-8")
    (private / "part").rename(private / f"rank-{rank}.json")
def wait_for(path):
    while not path.exists():
        time.sleep(0.01)
def mark(name):
    (folder.path / name).write_text(str(os.getpid()))
"""


def command(folder: Path, script: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + script, str(folder)]


def run(folder: Path, script: str) -> tuple[int, Status | None]:
    with RunLock(folder) as lock:
        code = run_ranks(command(folder, script), 2, RunFolder(folder), lock)
    return code, RunFolder(folder).status()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_GRACE_SECONDS", "_FINAL_STATE_SECONDS", "_STATUS_SECONDS"):
        monkeypatch.setattr(ranks_module, name, 0.2)


@pytest.mark.parametrize("code", [0, 75, 76])
def test_the_exit_code_is_that_of_rank_0(tmp_path: Path, code: int) -> None:
    found, status = run(tmp_path, f"sys.exit({code} if rank == 0 else 1)")
    assert found == code
    assert status is None


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("hang", ["rank == 1", "True"])
def test_ranks_that_hang_after_the_end_of_the_run_are_killed(tmp_path: Path, hang: str) -> None:
    script = f"say('finished') if rank == 0 else None\nif {hang}: time.sleep(600)"
    code, status = run(tmp_path, script)
    assert code == 0
    assert status is not None
    assert status.state == "finished"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path, victim: int) -> None:
    script = f"""
if rank == 0:
    say("running")
if rank == {victim}:
    wait_for(folder.status_file)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    time.sleep(0.5)
    report("connection closed")
time.sleep(600)
"""
    code, status = run(tmp_path, script)
    assert (code, status and status.state) == (1, "failed")
    assert status is not None
    assert status.reason == f"rank {victim} was killed by SIGKILL"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("first", "reason"), [(0, "no space"), (1, "rank 1: label -1")])
def test_the_reason_is_that_of_the_rank_that_failed_first(tmp_path: Path, first: int, reason: str) -> None:
    script = f"""
if rank == 0:
    if {first} == 1: wait_for(private / "rank-1.json")
    say("failed", "no space" if {first} == 0 else "connection closed")
else:
    if {first} == 0: wait_for(folder.status_file)
    report("label -1" if {first} == 1 else "connection closed")
    time.sleep(600)  # in the clean-up
sys.exit(1)
"""
    code, status = run(tmp_path, script)
    assert code == 1
    assert status is not None
    assert (status.state, status.reason) == ("failed", reason)


def test_a_run_stopped_while_its_ranks_start_is_interrupted(tmp_path: Path) -> None:
    def stop() -> None:
        wait_until((tmp_path / "1").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    script = """
if rank == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in training, where the loop checks later
mark(str(rank))
time.sleep(600)
"""
    threading.Thread(target=stop).start()
    code, status = run(tmp_path, script)
    assert code == 75
    assert status is not None
    assert status.reason.startswith("stopped by SIGTERM before training")


WORKER = """
import sys
from oelm.runs.lock import RunLock
from oelm.experiments.launch.ranks import run_ranks
from oelm.runs.folder import RunFolder
with RunLock(sys.argv[1]) as lock:
    run_ranks([sys.executable, "-c", sys.argv[2], sys.argv[1]], 2, RunFolder(sys.argv[1]), lock)
"""


def kill_worker_of(folder: Path, script: str) -> list[int]:
    """Start a worker and kill it when both ranks have started; returns the process IDs of the ranks."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), PRELUDE + script],
        env={**os.environ, "TMPDIR": str(folder)},  # a killed worker cannot remove its private folder
    )
    marks = [folder / "0", folder / "1"]
    wait_until(lambda: all(mark.exists() and mark.read_text(encoding="utf-8") for mark in marks))
    worker.kill()
    worker.wait()
    return [int(mark.read_text(encoding="utf-8")) for mark in marks]


@pytest.mark.parametrize("way", ["both", "pipe"])
def test_ranks_end_when_their_worker_is_killed(tmp_path: Path, way: str) -> None:
    """On Linux by a death signal, on other systems by a pipe."""
    no_signal = "sys.platform = 'other'\n" if way == "pipe" else ""
    pids = kill_worker_of(tmp_path, no_signal + "follow_parent()\nmark(str(rank))\ntime.sleep(600)")
    wait_until(lambda: not any(map(process_alive, pids)))
    wait_until(lambda: not is_held(tmp_path))


def test_the_lock_is_held_while_a_rank_is_alive(tmp_path: Path) -> None:
    pids = kill_worker_of(tmp_path, "mark(str(rank))\ntime.sleep(600)")  # these ranks outlive their worker
    for pid in pids:
        assert is_held(tmp_path)
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_held(tmp_path))
