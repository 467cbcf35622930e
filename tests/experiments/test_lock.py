"""Locks under SIGKILL, among processes, and on a file system that knows no flock."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oelm.experiments import lock as lock_module
from oelm.experiments.lock import Busy, RunLock, is_held, process_alive, read_holder

HOLD = """
import sys, time
from oelm.experiments import lock
if sys.argv[2] == "no-flock":
    import errno
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks here")
    lock.fcntl.flock = refuse
with lock.RunLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(900)
"""


def hold(folder: Path, kind: str = "flock") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), kind], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def refuse_flock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks here")


@pytest.mark.parametrize("kind", ["flock", "no-flock"])
def test_one_holder_and_a_kill_frees_it(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = hold(tmp_path, kind)
    if kind == "no-flock":
        monkeypatch.setattr(lock_module.fcntl, "flock", refuse_flock)
    try:
        assert is_held(tmp_path)
        with pytest.raises(Busy, match=str(process.pid)), RunLock(tmp_path, patience=0.1):
            pass
        assert read_holder(tmp_path)["pid"] == process.pid
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=300)
    assert not is_held(tmp_path)
    with RunLock(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def test_without_flock_a_foreign_owner_counts_until_its_heartbeat_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module.fcntl, "flock", refuse_flock)
    owner = tmp_path / "lock.owner"
    owner.write_text('{"host": "another-host", "pid": 1}')
    (tmp_path / "lock").touch()
    assert is_held(tmp_path)
    old = time.time() - lock_module.STALE_SECONDS - 1
    os.utime(owner, (old, old))
    assert not is_held(tmp_path)
    with RunLock(tmp_path):
        assert read_holder(tmp_path)["pid"] == os.getpid()


def test_the_lock_can_be_taken_again_after_an_error_inside(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), RunLock(tmp_path):
        raise ValueError("inside")
    with RunLock(tmp_path, patience=0):
        pass


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_holder(tmp_path: Path) -> None:
    """Tokenising forks worker processes; they may outlive a holder that was killed."""
    program = """
import os, sys, time
from oelm.experiments.lock import RunLock
with RunLock(sys.argv[1]):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # from the child: it has begun, and let go
        time.sleep(900)
        os._exit(0)
    time.sleep(900)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert is_held(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=300)
        assert process_alive(child)
        assert not is_held(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_reused_pid_is_not_taken_for_the_old_process() -> None:
    assert process_alive(os.getpid())
    assert not process_alive(os.getpid(), start=-5.0)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=300)
    assert not process_alive(child.pid)
