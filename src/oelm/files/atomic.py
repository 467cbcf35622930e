"""Write files atomically: after a kill or on a full disk, a file has either its old or its new content.

The content is written to a temporary file in the same folder. The temporary file is flushed to disk and then
renamed to the final name.
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

from oelm.files.locks import process_alive

_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")  # the number is the pid of the process that writes the file
_DEVICE = re.compile(r"/dev/(fd/)?[^/]+")


@contextlib.contextmanager
def atomic_open(path: Path | str, mode: str = "wb") -> Iterator[IO[Any]]:
    """Yield a temporary file that replaces `path` when the `with` block ends without an error.

    A device, such as /dev/stdout or /dev/null, is written to directly: a file must never take its place.
    """
    path = Path(path)
    encoding = None if "b" in mode else "utf-8"
    if _DEVICE.fullmatch(str(path)):
        with open(path, mode, encoding=encoding) as file:
            yield file
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # a failed deletion must not hide the original error
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path | str, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_open(path, "w") as file:
        file.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity raise ValueError."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Return `value` as indented JSON, the text that `write_json()` writes."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def remove_leftovers(folder: Path | str, *, min_age: float = 0.0) -> int:
    """Delete the temporary files that killed processes left in `folder`; return the number of deleted files.

    A file is kept as long as the process that writes it exists on this host. If processes of other hosts also
    write to the folder, pass `min_age`: only files older than this many seconds are deleted.
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
    if pid != os.getpid() and process_alive(pid):
        return False
    try:
        return min_age <= 0 or time.time() - entry.stat(follow_symlinks=False).st_mtime > min_age
    except OSError:
        return False


def is_disk_full(error: BaseException) -> bool:
    """Return whether `error` was caused by a full disk or an exhausted disk quota."""
    return has_errno(error, errno.ENOSPC, errno.EDQUOT)


def has_errno(error: BaseException, *numbers: int) -> bool:
    """Return whether `error`, or the error that caused it, has one of the error numbers `numbers`.

    Some libraries replace an OSError by their own exception and keep only the text of the OSError, so the
    text is checked too.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    cause = error.__cause__
    return any(os.strerror(n) in str(error) for n in numbers) or (
        cause is not None and has_errno(cause, *numbers)
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
