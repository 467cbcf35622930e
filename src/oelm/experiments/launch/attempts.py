"""The file attempts.jsonl of a run folder: one line for each process that worked on the run.

Lines are only appended, so the file keeps the history of a run that was interrupted or failed.
"""

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

    exit_code: int  # negative if a signal killed the process: -9 for SIGKILL
    reason: str = ""
    time: float = field(default_factory=time.time)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def append_attempt(folder: Path, attempt: Attempt) -> None:
    """Append one attempt to attempts.jsonl of the run folder.

    Does nothing if the disk is full or the folder was moved: status.json also says why the process ended.
    """
    line = (json.dumps(asdict(attempt)) + "\n").encode()
    with contextlib.suppress(OSError):
        file = os.open(folder / ATTEMPTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(file).st_size
            if os.write(file, line) != len(line):  # the disk is full, so remove the incomplete line
                os.ftruncate(file, size)
        finally:
            os.close(file)


def read_attempts(folder: Path) -> list[Attempt]:
    """Return all attempts at the run, oldest first; [] if no process has worked on the run."""
    try:
        rows = list(read_json_lines(folder / ATTEMPTS))
    except FileNotFoundError:
        return []
    return [from_mapping(Attempt, row, ATTEMPTS) for row in rows]


def last_exit_code(folder: Path) -> int | None:
    """Return the exit code of the last attempt at the run; None if attempts.jsonl is missing or damaged."""
    try:
        return read_attempts(folder)[-1].exit_code
    except (OelmError, OSError, IndexError):
        return None
