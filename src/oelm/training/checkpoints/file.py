"""The file format of latest.pt and previous.pt.

A checkpoint is an ordinary torch file (a zip archive). The comment of the archive is the SHA-256 of the rest
of the file, so that one rename replaces content and checksum together. A checkpoint is loaded with
`weights_only=True`, so that it cannot execute code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from oelm.errors import OelmError
from oelm.files.atomic import atomic_open, is_disk_full

_DIGEST_BYTES = 64  # length of the archive comment: a SHA-256 in hex
_NO_COMMENT = b"\0\0"  # the last two bytes of a zip archive without a comment: comment length 0
_COMMENT_LENGTH = _DIGEST_BYTES.to_bytes(2, "little")


class UnusableCheckpoint(OelmError):
    """A checkpoint file cannot be used; the message names the file and the reason."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path


@dataclass(frozen=True)
class NewestCheckpoint:
    """The content of the newest usable checkpoint (None if there is none), and the unusable newer files."""

    state: dict[str, Any] | None
    rejected: tuple[UnusableCheckpoint, ...] = ()


def save_checkpoint(state: dict[str, Any], latest: Path, previous: Path) -> int:
    """Write `state` to `latest`, and keep the old `latest` as `previous`; return the size in bytes.

    If the process is killed or the disk is full (OSError), the old `latest` stays in place.
    """
    with atomic_open(latest) as file:
        writer = _HashingWriter(file)
        torch.save(_intern_strings(state), cast(IO[bytes], writer))
        writer.finish()
        if latest.exists():
            _keep_as_previous(latest, previous)
    return latest.stat().st_size


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint and verify its checksum; raise UnusableCheckpoint if it is damaged."""
    try:
        _verify(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnusableCheckpoint:
        raise
    except Exception as error:  # torch raises many types of errors for a damaged archive
        raise UnusableCheckpoint(path, f"cannot be read: {error}") from error


def load_newest(
    latest: Path, previous: Path, check: Callable[[dict[str, Any]], str] = lambda state: ""
) -> NewestCheckpoint:
    """Load `latest`, or `previous` if `latest` is unusable.

    `check` returns why an undamaged checkpoint is unusable, or "". If there are checkpoints but none is
    usable, raise OelmError, because a run that starts over would overwrite them.
    """
    rejected: list[UnusableCheckpoint] = []
    for path in (path for path in (latest, previous) if path.exists()):
        try:
            state = load_checkpoint(path)
            if problem := check(state):
                raise UnusableCheckpoint(path, f"cannot be used: {problem}")
        except UnusableCheckpoint as error:
            rejected.append(error)
            continue
        return NewestCheckpoint(state, tuple(rejected))
    if rejected:
        raise OelmError(
            f"no checkpoint of this run is usable: {'; '.join(map(str, rejected))}. Restore the files from a "
            f"copy, or delete {latest.name} and {previous.name} to start the run over."
        )
    return NewestCheckpoint(None)


class _HashingWriter:
    """A file object for torch.save() that hashes the bytes it writes.

    `write()` stores an OSError, and `finish()` raises it. If `write()` raised it, torch's C++ code would
    replace "no space left on device" by an unrelated error.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.last = b""  # the last two bytes written
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._write(view)
            except OSError as error:
                self.error = error
        return len(view)

    def _write(self, view: memoryview) -> None:
        self.hash.update(view)
        self.file.write(view)
        self.last = (self.last + bytes(view[-2:]))[-2:]

    def flush(self) -> None:
        """Do nothing. torch.save() requires this method; `atomic_open()` flushes the file at the end."""

    def finish(self) -> None:
        """Write the checksum as the comment of the zip archive; raise the OSError of an earlier `write()`."""
        if self.error is not None:
            raise self.error
        if self.last != _NO_COMMENT:
            raise OelmError(
                "cannot add a checksum to the checkpoint, because the file that this version of torch writes "
                "does not end like a zip archive with an empty comment: install a supported version of torch"
            )
        self.file.seek(-len(_NO_COMMENT), os.SEEK_CUR)
        self.file.write(_COMMENT_LENGTH + self.hash.hexdigest().encode())


def _verify(path: Path) -> None:
    trailer = len(_COMMENT_LENGTH) + _DIGEST_BYTES
    left = path.stat().st_size - trailer
    if left <= 0:
        raise UnusableCheckpoint(path, f"is damaged: it has only {left + trailer} bytes")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 22))):
            digest.update(block)
            left -= len(block)
        end = file.read()
    digest.update(_NO_COMMENT)
    if end != _COMMENT_LENGTH + digest.hexdigest().encode():
        raise UnusableCheckpoint(path, "is damaged: its checksum does not match (truncated or altered)")


def _intern_strings(value: Any) -> Any:
    """Return `value` with equal strings replaced by the same object, so that equal states give equal bytes.

    Pickle writes the second use of the same string object as a reference, but a different object with an
    equal string as a full string. Without this function, the bytes of a checkpoint would depend on whether a
    dict key was created by this process or read from an older checkpoint.
    """
    if isinstance(value, str):
        return sys.intern(value)
    if isinstance(value, dict):
        return {_intern_strings(key): _intern_strings(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_intern_strings(inner) for inner in value]
    return value


def _keep_as_previous(latest: Path, previous: Path) -> None:
    """Make `previous` a hard link to `latest`; with a rename, `latest` would be missing for a moment."""
    link = previous.with_name(f".{previous.name}.{os.getpid()}.tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(latest, link)
    except OSError as error:
        if is_disk_full(error):
            raise
        os.replace(latest, previous)  # for file systems without hard links
        return
    try:
        os.replace(link, previous)
    except OSError:
        with contextlib.suppress(OSError):
            link.unlink()
        raise
