"""A lock between processes that is released even if the process that holds it is killed.

The lock uses flock, which the kernel releases when the process ends for any reason. This also works between
hosts on network file systems with flock (NFSv4, Lustre mounted with -o flock, GPFS). On a file system without
flock, the process that created the file `<lock>.owner` holds the lock, and touches that file regularly.
Another process may take the lock if the holder does not exist any more (same host), or has not touched the
file for STALE_SECONDS (other host).

The lock file records the host, pid and start time of the process that holds the lock. The start time is
needed because the operating system may give the same pid to a later process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from oelm.errors import OelmError
from oelm.files.read import read_bytes

STALE_SECONDS = 300.0
_BEAT_SECONDS = 30.0
_RETRY_SECONDS = 0.05
_RECORD_BYTES = 4096  # largest accepted record (host, pid, ...) in a lock file; usually about 100 bytes
_ZOMBIE = -1.0  # returned instead of a start time if the process has ended but its parent has not reaped it
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

_held_files: set[int] = set()


def _close_locks_in_child() -> None:
    """Close the lock files in a forked child, which would otherwise hold the locks after its parent ends."""
    for file in _held_files:
        with contextlib.suppress(OSError):
            os.close(file)
    _held_files.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


class Busy(OelmError):
    """Another process holds the lock that was requested."""

    exit_code = 77


class Lock:
    """A context manager that holds the lock with the lock file `path`.

    If another process holds the lock, entering the `with` block waits up to `patience` seconds, then
    raises `Busy`.
    """

    def __init__(self, path: Path, patience: float = float("inf")) -> None:
        self.path = path
        self.patience = patience
        self.file: int | None = None  # file descriptor of the locked file
        self._beat: _Heartbeat | None = None

    def __enter__(self) -> Lock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.patience
        while not self._try():
            if time.monotonic() > deadline:
                raise Busy(self._busy())
            time.sleep(_RETRY_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beat is not None:
            self._beat.stop()
            self._beat = None
        if self.file is not None:
            _held_files.discard(self.file)
            # Closing the file releases the flock. The file is not deleted: otherwise one process could lock
            # a new file while another process still has a lock on the deleted file.
            os.close(self.file)
            self.file = None

    def _busy(self) -> str:
        return f"{self.path} is held by {holder_name(self.path)}"

    def _try(self) -> bool:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in _UNSUPPORTED:
                return self._try_without_flock()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        with contextlib.suppress(OSError):  # the record is only for messages: lock even if the disk is full
            os.ftruncate(file, 0)
            os.write(file, _my_record())
        self.file = file
        _held_files.add(file)
        return True

    def _try_without_flock(self) -> bool:
        owner = _owner_file(self.path)
        try:
            file = os.open(owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            record = _read(owner)
            if _is_abandoned(owner, record):
                _remove_abandoned(owner, record)
            return False  # the caller tries again, and can create the file if it was just removed
        record = _my_record()
        with contextlib.suppress(OSError):
            os.write(file, record)
        os.close(file)
        self._beat = _Heartbeat(owner, record)
        return True


class _Heartbeat:
    """A thread that touches the owner file of a lock regularly; `stop()` ends it and deletes the file."""

    def __init__(self, owner: Path, record: bytes) -> None:
        self.owner, self.record = owner, record
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._end.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.owner)

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        # If this machine was suspended for long, another process may have taken the lock: keep its file.
        if _read(self.owner) in (self.record, b""):
            self.owner.unlink(missing_ok=True)


def is_locked(path: Path) -> bool:
    """Return whether any process holds the lock with the lock file `path`."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            owner = _owner_file(path)
            return owner.exists() and not _is_abandoned(owner, _read(owner))
        return True
    finally:
        os.close(file)
    return False


def holder(path: Path) -> dict[str, Any]:
    """Return host, pid and start time of the process that holds or last held a lock; {} if unknown."""
    return _fields(_read(_owner_file(path))) or _fields(_read(path))


def holder_name(path: Path) -> str:
    """Return the holder of a lock as "process <pid> on <host>", for messages."""
    who = holder(path)
    return f"process {who.get('pid')} on {who.get('host')}" if who else "another process"


def keep_inherited_lock(file: int) -> None:
    """Hold the lock inherited from the parent process as file descriptor `file`, until this process ends."""
    os.set_inheritable(file, False)
    _held_files.add(file)


def process_alive(pid: int, start: float | None = None) -> bool:
    """Return whether the process `pid` exists on this host and, if `start` is given, has this start time.

    The start time distinguishes a process from a later process with the same pid.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    now = _start_time(pid)
    if now == _ZOMBIE:
        return False
    return start is None or now is None or now == start


def _owner_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.owner")


def _my_record() -> bytes:
    record = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": _start_time(os.getpid()),
        "token": secrets.token_hex(8),  # distinguishes two locks of the same process
    }
    return json.dumps(record).encode()


def _start_time(pid: int) -> float | None:
    """Return the start time of a process in clock ticks since boot (Linux); None if it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return _ZOMBIE
    return float(fields[19])


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, max_bytes=_RECORD_BYTES)
    except (OelmError, OSError):
        return b""


def _fields(record: bytes) -> dict[str, Any]:
    """Return the JSON record in a lock file as a dict; {} if the record is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(record)
        if isinstance(fields, dict):
            return fields
    return {}


def _is_abandoned(owner: Path, record: bytes) -> bool:
    fields = _fields(record)
    pid, start = fields.get("pid"), fields.get("process_start")
    if fields.get("host") == socket.gethostname() and isinstance(pid, int) and pid > 0:
        return not process_alive(pid, start if isinstance(start, int | float) else None)
    try:
        return time.time() - owner.stat().st_mtime > STALE_SECONDS
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _remove_abandoned(owner: Path, record: bytes) -> None:
    moved = owner.with_name(f"{owner.name}.abandoned.{socket.gethostname()}.{os.getpid()}")
    try:
        os.rename(owner, moved)
    except FileNotFoundError:
        return
    if _read(moved) != record:  # another process has taken the lock in the meantime: restore its file
        with contextlib.suppress(FileExistsError):
            os.link(moved, owner)
    moved.unlink(missing_ok=True)
