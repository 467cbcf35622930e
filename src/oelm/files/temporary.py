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
    for folder in place.glob(f"{prefix}*"):
        parts = folder.name.removeprefix(prefix).rsplit("-", 2)  # host, pid and a random suffix
        here = len(parts) == 3 and parts[0] == socket.gethostname() and parts[1].isdecimal()
        if here and not process_alive(int(parts[1])):
            shutil.rmtree(folder, ignore_errors=True)
