"""Files that are either the old one or the new one, never half of one.

Write to a temporary file beside the target, flush it to the disk, rename. A process killed at any
moment leaves the old file whole; a full disk raises before the old file is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


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
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path | str, text: str) -> None:
    with atomic_open(path, "w") as file:
        file.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Readable JSON with a stable key order as given; NaN is refused rather than written as non-JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
