"""attempts.jsonl of a run folder: one line for each process that worked on the run, never rewritten."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from oelm.config.mapping import from_mapping
from oelm.errors import OelmError
from oelm.files.read import read_json_lines

ATTEMPTS = "attempts.jsonl"


@dataclass(frozen=True)
class Attempt:
    """How one process that worked on a run ended."""

    exit_code: int
    reason: str = ""
    time: float = field(default_factory=time.time)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def append_attempt(folder: Path, attempt: Attempt) -> None:
    """Add a line. Does nothing on a full disk or in a folder that was moved: status.json has the reason."""
    line = (json.dumps(asdict(attempt)) + "\n").encode()
    with contextlib.suppress(OSError):
        file = os.open(folder / ATTEMPTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(file).st_size
            if os.write(file, line) != len(line):  # the disk is full: leave no partial line
                os.ftruncate(file, size)
        finally:
            os.close(file)


def read_attempts(folder: Path) -> list[Attempt]:
    """All attempts at the run, oldest first; [] when there was none."""
    try:
        rows = list(read_json_lines(folder / ATTEMPTS))
    except FileNotFoundError:
        return []
    return [from_mapping(Attempt, row, ATTEMPTS) for row in rows]


def last_exit_code(folder: Path) -> int | None:
    """The exit code of the last attempt; None when there is none or the file is damaged."""
    try:
        return read_attempts(folder)[-1].exit_code
    except (OelmError, OSError, IndexError):
        return None
