"""latest.pt and previous.pt: everything an exact resume needs, whole or not at all.

A checkpoint is an ordinary torch file (a zip archive) with the SHA-256 of its bytes in the archive's
comment, so that one rename makes file and checksum appear together. It is loaded with
`weights_only=True`: nothing in it can run code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch

from oelm.errors import OelmError
from oelm.files.atomic import atomic_open, is_disk_full

_DIGEST_BYTES = 64  # hex SHA-256, the whole archive comment
_COMMENT_LENGTH_AT = -2  # the last field of a zip archive without a comment


class CorruptCheckpoint(OelmError):
    """The file is there but not whole."""


def save_checkpoint(state: dict[str, Any], latest: Path, previous: Path) -> int:
    """Write `state` as `latest`, keeping the one before as `previous`; returns the bytes written.

    There is no moment without a whole `latest` once there was one: a kill leaves the old, a full disk
    raises OSError and leaves the old.
    """
    with atomic_open(latest) as file:
        writer = _HashingWriter(file)
        torch.save(_canonical(state), cast(IO[bytes], writer))
        writer.finish()
        if latest.exists():
            _keep(latest, previous)
    return latest.stat().st_size


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read and verify one checkpoint; CorruptCheckpoint says what is wrong with it."""
    try:
        _verify(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except CorruptCheckpoint:
        raise
    except Exception as error:  # torch raises half a dozen kinds for a damaged archive
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error


def load_newest(
    latest: Path, previous: Path, check: Callable[[dict[str, Any]], str] = lambda state: ""
) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest usable checkpoint (None when there is none) and why each newer one was not used.

    `check` returns why an intact checkpoint cannot be used, or "". When files exist and none is usable, that
    is an error: starting over would overwrite evidence.
    """
    problems: list[str] = []
    for path in (path for path in (latest, previous) if path.exists()):
        try:
            state = load_checkpoint(path)
        except CorruptCheckpoint as error:
            problems.append(str(error))
            continue
        problem = check(state)
        if not problem:
            return state, problems
        problems.append(f"{path} cannot be used: {problem}")
    if problems:
        raise CorruptCheckpoint(
            f"no checkpoint of this run is usable: {'; '.join(problems)}. Put the files back from a copy, or "
            f"remove {latest.name} and {previous.name} to start the run over."
        )
    return None, problems


class _HashingWriter:
    """A file for torch.save that hashes what passes.

    Errors are kept and raised by `finish`: raised inside `write` they would reach C++ code that turns
    "no space left on device" into an unrelated complaint.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.tail = b""  # the last bytes, held back: they hold the comment length
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._pass_on(view)
            except OSError as error:
                self.error = error
        return len(view)

    def _pass_on(self, view: memoryview) -> None:
        if len(view) < -_COMMENT_LENGTH_AT:
            joined = self.tail + bytes(view)
            body, self.tail = joined[:_COMMENT_LENGTH_AT], joined[_COMMENT_LENGTH_AT:]
            if len(joined) < -_COMMENT_LENGTH_AT:
                body, self.tail = b"", joined
            self._emit(body)
            return
        self._emit(self.tail)
        self._emit(view[:_COMMENT_LENGTH_AT])
        self.tail = bytes(view[_COMMENT_LENGTH_AT:])

    def _emit(self, data: Any) -> None:
        self.hash.update(data)
        self.file.write(data)

    def flush(self) -> None:
        """torch.save asks for it; atomic_open does the real one."""

    def finish(self) -> None:
        if self.error is not None:
            raise self.error
        if self.tail != b"\0\0":
            raise OelmError("torch.save did not end in a zip archive without comment; cannot add a checksum")
        self.file.write(_DIGEST_BYTES.to_bytes(2, "little") + self.hash.hexdigest().encode())


def _verify(path: Path) -> None:
    trailer = 2 + _DIGEST_BYTES
    body = path.stat().st_size - trailer
    if body <= 0:
        raise CorruptCheckpoint(f"{path} is truncated ({body + trailer} bytes)")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while body > 0:
            block = file.read(min(body, 1 << 22))
            digest.update(block)
            body -= len(block)
        end = file.read()
    if end[:2] != _DIGEST_BYTES.to_bytes(2, "little") or end[2:] != digest.hexdigest().encode():
        raise CorruptCheckpoint(f"{path} is damaged: its checksum does not match (truncated or altered)")


def _canonical(value: Any) -> Any:
    """The same value with one object per distinct text: pickle writes a repeated object as a reference, and
    equal states must be equal bytes whether their keys were made here or read from a file."""
    if isinstance(value, str):
        return sys.intern(value)
    if isinstance(value, dict):
        return {_canonical(key): _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return value


def _keep(latest: Path, previous: Path) -> None:
    """Give `latest` its second name; a hard link, because a rename would leave a moment without it."""
    link = previous.with_name(f".{previous.name}.{os.getpid()}.tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(latest, link)
    except OSError as error:
        if is_disk_full(error):
            raise
        os.replace(latest, previous)  # a file system without hard links
        return
    try:
        os.replace(link, previous)
    except OSError:
        with contextlib.suppress(OSError):
            link.unlink()
        raise
