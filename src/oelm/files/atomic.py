"""Files that are either the old one or the new one, never half of one.

Write to a temporary file beside the target, flush it to the disk, rename. A process killed at any
moment leaves the old file whole; a full disk raises before the old file is touched.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")  # the number is the process that writes it


@contextlib.contextmanager
def atomic_open(path: Path | str, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file that becomes `path` when the block ends without an error."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    encoding = None if "b" in mode else "utf-8"
    try:
        with open(temporary, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that is raised is the one that counts
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path | str, text: str) -> None:
    with atomic_open(path, "w") as file:
        file.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Readable JSON with a stable key order as given; NaN is refused rather than written as non-JSON."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def remove_leftovers(folder: Path | str, *, min_age: float = 0.0) -> int:
    """Delete the temporary files that killed writers left in `folder`; returns how many.

    A temporary file is kept while its process exists on this host. Where several hosts write, pass as
    `min_age` the seconds after which a writer on another host must be gone, too.
    """
    removed = 0
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            match = _TEMPORARY.fullmatch(entry.name)
            if match and _writer_is_gone(entry, int(match[1]), min_age):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    removed += 1
    return removed


def _writer_is_gone(entry: os.DirEntry[str], pid: int, min_age: float) -> bool:
    if pid != os.getpid() and _process_exists(pid):
        return False
    try:
        return min_age <= 0 or time.time() - entry.stat(follow_symlinks=False).st_mtime > min_age
    except OSError:
        return False


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def is_disk_full(error: BaseException) -> bool:
    """Whether no space, inode or quota was left; also when a library only passes on the system's text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    cause = error.__cause__
    return os.strerror(errno.ENOSPC) in str(error) or (cause is not None and is_disk_full(cause))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
