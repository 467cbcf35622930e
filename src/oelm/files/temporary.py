"""Temporary folders that are deleted later if the process that created them was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from oelm.files.locks import process_alive


@contextlib.contextmanager
def temporary_folder(place: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in `place`, and delete it afterwards.

    The folders with this prefix that killed processes of this host left in `place` are deleted too.
    """
    _remove_abandoned(place, prefix)
    mine = f"{prefix}{socket.gethostname()}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=mine, dir=place) as folder:
        yield Path(folder)


def _remove_abandoned(place: Path, prefix: str) -> None:
    mine = f"{prefix}{socket.gethostname()}-"
    for folder in place.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(mine).partition("-")[0]
        if folder.name.startswith(mine) and pid.isdecimal() and not process_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
