"""Locks under SIGKILL, among processes, and on a file system that knows no flock."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oelm.data.tokenize.store import locked
from oelm.files.locks import STALE_SECONDS, _remove_abandoned, is_locked, process_alive
from oelm.runs.lock import Busy, RunLock, is_held, read_holder

HOLD = """
import sys, time
from oelm.runs.lock import RunLock
if sys.argv[2] == "no-flock":
    import errno, fcntl
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks here")
    fcntl.flock = refuse
with RunLock(sys.argv[1]):
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


def make_stale(owner: Path) -> None:
    old = time.time() - STALE_SECONDS - 1
    os.utime(owner, (old, old))


@pytest.mark.parametrize("kind", ["flock", "no-flock"])
def test_one_holder_and_a_kill_frees_it(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = hold(tmp_path, kind)
    if kind == "no-flock":
        monkeypatch.setattr(fcntl, "flock", refuse_flock)
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
    monkeypatch.setattr(fcntl, "flock", refuse_flock)
    owner = tmp_path / "lock.owner"
    owner.write_text('{"host": "another-host", "pid": 1}')
    (tmp_path / "lock").touch()
    assert is_held(tmp_path)
    make_stale(owner)
    assert not is_held(tmp_path)
    with RunLock(tmp_path):
        assert read_holder(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "7", '{"host": "HERE", "pid": "x"}', '{"host": "HERE", "pid": 1e400}', "\xff"]
)
def test_a_broken_record_of_the_owner_counts_until_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_flock)
    (tmp_path / "lock").touch()
    owner = tmp_path / "lock.owner"
    owner.write_bytes(content.replace("HERE", socket.gethostname()).encode("latin-1"))
    assert is_held(tmp_path)  # it may be being written
    with pytest.raises(Busy, match=r"another process|process x|process inf"), RunLock(tmp_path, patience=0):
        pass
    make_stale(owner)
    assert not is_held(tmp_path)
    with RunLock(tmp_path):
        assert read_holder(tmp_path)["pid"] == os.getpid()
    assert not owner.exists()


def test_a_lock_that_was_taken_over_meanwhile_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes see one abandoned owner: the slower must not remove the record of the faster."""
    monkeypatch.setattr(fcntl, "flock", refuse_flock)
    owner = tmp_path / "lock.owner"
    with RunLock(tmp_path):
        mine = owner.read_bytes()
        _remove_abandoned(owner, b"what the slower one had read")
        assert owner.read_bytes() == mine
    assert list(tmp_path.glob("lock.*")) == []


def test_the_data_cache_is_locked_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_flock)
    with locked(tmp_path / "cache" / "tokens"):
        assert is_locked(tmp_path / "cache" / "tokens.lock")
    assert not is_locked(tmp_path / "cache" / "tokens.lock")


def test_the_lock_can_be_taken_again_after_an_error_inside(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), RunLock(tmp_path):
        raise ValueError("inside")
    with RunLock(tmp_path, patience=0):
        pass


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_holder(tmp_path: Path) -> None:
    """Tokenising forks worker processes; they may outlive a holder that was killed."""
    program = """
import os, sys, time
from oelm.runs.lock import RunLock
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
