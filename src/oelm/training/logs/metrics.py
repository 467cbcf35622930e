"""Write metrics.jsonl, one JSON row per measurement or event.

The file is bit-identical however often a run was interrupted, because rows contain no times and no host
names. A checkpoint contains the length and the hash of the file. A resumed run checks the hash and truncates
the file to that length, so that repeated training steps do not write their rows twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oelm.errors import OelmError, TransientError
from oelm.training.logs.trackers import Tracker


class MetricsLog:
    """Truncates metrics.jsonl to `offset` bytes, then appends rows and also sends them to the trackers."""

    def __init__(self, path: Path, *, offset: int = 0, trackers: Sequence[Tracker] = ()) -> None:
        self.path = path
        self.trackers = list(trackers)
        prefix = _hash_prefix(path, offset)
        if prefix is None:
            raise OelmError(
                f"the run cannot be resumed, because {path} has lost rows: it is shorter than the {offset} "
                "bytes that the checkpoint recorded. Restore the file from a copy, or start over in another "
                "folder."
            )
        self._hash = prefix
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._file.truncate(offset)

    def row(self, step: int, kind: str, **values: Any) -> None:
        record = {"step": step, "kind": kind, **values}
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._hash.update(line)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for tracker in self.trackers:
            if numbers:
                tracker.log(step, {f"{kind}/{name}": float(value) for name, value in numbers.items()})

    def sync(self) -> tuple[int, str]:
        """Flush the rows to disk; return the length in bytes and the SHA-256 of metrics.jsonl."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size, self._hash.hexdigest()

    def check(self) -> None:
        """Raise TransientError if metrics.jsonl on disk differs from what this run wrote."""
        length, sha256 = self.sync()
        if problem := metrics_problem(self.path, length, sha256):
            raise TransientError(f"{problem}. Run the same command again to resume from the last checkpoint.")

    def close(self) -> None:
        self._file.close()
        for tracker in self.trackers:
            tracker.close()


def metrics_problem(path: Path, length: int, sha256: str) -> str:
    """Return why the first `length` bytes of metrics.jsonl do not match `sha256`, or "" if they do."""
    prefix = _hash_prefix(path, length)
    if prefix is None:
        return f"rows of {path} are missing"
    return "" if prefix.hexdigest() == sha256 else f"rows of {path} were changed after they were written"


def _hash_prefix(path: Path, length: int) -> hashlib._Hash | None:
    """Return the SHA-256 object of the first `length` bytes of a file, or None if the file is shorter."""
    digest = hashlib.sha256()
    if length:
        try:
            with open(path, "rb") as file:
                while length and (block := file.read(min(length, 1 << 20))):
                    digest.update(block)
                    length -= len(block)
        except FileNotFoundError:
            pass
    return digest if not length else None
