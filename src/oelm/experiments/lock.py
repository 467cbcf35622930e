"""One run, one writer: a lock that a killed process cannot leave behind.

The kernel's flock on the run folder's `lock` file: it ends with the process that holds it, however that
ends, so no clean-up is needed after a SIGKILL. It also works between hosts on network file systems that
pass flock on (NFSv4, Lustre mounted with -o flock, GPFS). Where the file system refuses it, ownership is a
file created with O_EXCL whose record is refreshed while its owner lives; it counts as abandoned when its
process is gone (same host) or its heartbeat is older than STALE_SECONDS (another host).

The lock file also says who holds it: host, pid, the process's start time (a pid alone may be reused).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from oelm.errors import OelmError

STALE_SECONDS = 300.0
_BEAT_SECONDS = 30.0
_ZOMBIE = -1.0  # "start time" of a process that has ended and was not yet collected
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


_held_files: set[int] = set()


def _let_go_in_child() -> None:
    """A forked child shares the lock: should the holder be killed, a child left over would keep it."""
    for file in _held_files:
        with contextlib.suppress(OSError):
            os.close(file)
    _held_files.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class Busy(OelmError):
    """The run is being worked on by another process."""

    exit_code = 77


class RunLock:
    """`with RunLock(folder): ...`; raises Busy, naming the holder, when another process has it.

    `patience`: seconds to keep trying, since `oelm status` may hold the lock for an instant to look.
    """

    def __init__(self, folder: Path | str, patience: float = 1.0) -> None:
        self.path = Path(folder) / "lock"
        self.patience = patience
        self._file: int | None = None
        self._beat: _Heartbeat | None = None

    def __enter__(self) -> RunLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.patience
        while not self._try():
            if time.monotonic() > deadline:
                who = read_holder(self.path.parent)
                name = f"process {who.get('pid')} on {who.get('host')}" if who else "another process"
                raise Busy(f"{self.path.parent} is being worked on by {name}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beat is not None:
            self._beat.stop()
            self._beat = None
        if self._file is not None:
            _held_files.discard(self._file)
            os.close(self._file)  # releases the flock; the file stays, so that no two files can be "the lock"
            self._file = None

    def _try(self) -> bool:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in _UNSUPPORTED:
                return self._try_without_flock()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        os.ftruncate(file, 0)
        os.write(file, json.dumps(_me()).encode())
        self._file = file
        _held_files.add(file)
        return True

    def _try_without_flock(self) -> bool:
        owner = self.path.with_name("lock.owner")
        try:
            file = os.open(owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            if not _abandoned(owner):
                return False
            # Only one of several that see it abandoned can win the rename; all then try afresh.
            with contextlib.suppress(FileNotFoundError):
                os.rename(owner, owner.with_name(f"lock.abandoned.{socket.gethostname()}.{os.getpid()}"))
            return False
        os.write(file, json.dumps(_me()).encode())
        os.close(file)
        self._beat = _Heartbeat(owner)
        return True


class _Heartbeat:
    """Touches the owner file while this process lives, and removes it at the end."""

    def __init__(self, owner: Path) -> None:
        self.owner = owner
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
        self.owner.unlink(missing_ok=True)


def is_held(folder: Path | str) -> bool:
    """Whether some process holds the run's lock right now; looks without keeping it."""
    path = Path(folder) / "lock"
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            owner = path.with_name("lock.owner")
            return owner.exists() and not _abandoned(owner)
        return True
    finally:
        os.close(file)
    return False


def read_holder(folder: Path | str) -> dict[str, Any]:
    """The record of who holds (or last held) the lock; {} when there is none."""
    for name in ("lock.owner", "lock"):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
            if isinstance(record, dict):
                return record
    return {}


def process_alive(pid: int, start: float | None = None) -> bool:
    """Whether this host has that process; with its start time, not merely one of the same number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    now = _start_time(pid)
    if now == _ZOMBIE:
        return False
    return start is None or now is None or now == start


def _me() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_start": _start_time(os.getpid())}


def _start_time(pid: int) -> float | None:
    """Clock ticks from boot to the process's start (Linux); None where there is no such record."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return _ZOMBIE
    return float(fields[19])


def _abandoned(owner: Path) -> bool:
    try:
        record = json.loads(owner.read_text(encoding="utf-8") or "{}")
        age = time.time() - owner.stat().st_mtime
    except (OSError, ValueError):
        return False
    if record.get("host") == socket.gethostname() and record.get("pid"):
        return not process_alive(record["pid"], record.get("process_start"))
    return age > STALE_SECONDS
