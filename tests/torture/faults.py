"""Inject a fault at the n-th file operation of a process: kill it, raise a disk error, or send a signal.

All operations with which oelm changes files below given folders are counted: open for writing, each write,
fsync, rename, link, unlink, mkdir, rmdir, truncate, and the writer of safetensors.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass
class FileFaults:
    """Counts file operations below the folders `roots` and injects `fault` at number `at` (0 = never).

    fault: one of
        "kill" (SIGKILL before the operation),
        "half" (SIGKILL after half the bytes of a write),
        an errno name such as "ENOSPC" (the operation fails),
        an errno name with "+" (the operation and every later one fail, except those that free space),
        a signal name such as "SIGTERM" (the process gets this signal before the operation)
    """

    roots: Sequence[Path]
    at: int = 0
    fault: str = "kill"
    operations: list[str] = field(default_factory=list)  # in order, such as "write status.json"
    _quiet: bool = False

    def install(self) -> None:
        """Replace the file functions of Python in this process, until it ends, by ones that count."""
        self._open, self._fd_names = io.open, {}
        builtins.open = io.open = self._open_file  # type: ignore[assignment]
        for name in ("replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir", "truncate"):
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        for name in ("fsync", "ftruncate", "write"):
            setattr(os, name, self._wrapped(name, getattr(os, name), of_descriptor=True))
        self._os_open = os.open
        os.open = self._open_descriptor  # type: ignore[assignment]
        with contextlib.suppress(ImportError):
            import safetensors.torch as module

            self._serialize = module.serialize_file
            module.serialize_file = self._serialize_file

    def happen(self, operation: str, path: Any, write_half: Callable[[], None] | None = None) -> None:
        """Count one file operation, and inject the fault if it is due."""
        if self._quiet or not self._below(path):
            return
        self.operations.append(f"{operation} {Path(os.fsdecode(path)).name}")
        number = len(self.operations)
        sticky = self.fault.endswith("+") and self.at and number > self.at
        if number != self.at and not sticky:
            return
        frees = operation in ("unlink", "remove", "rmdir")
        if self.fault == "half":
            if write_half is not None:
                write_half()
            self._die()
        if self.fault == "kill":
            self._die()
        if self.fault.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self.fault])
            return
        if frees and sticky:
            return
        code = getattr(errno, self.fault.rstrip("+"))
        named = operation not in ("write", "fsync", "ftruncate")  # real errors of these do not name a file
        raise OSError(code, os.strerror(code), os.fsdecode(path) if named else None)

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def _below(self, path: Any) -> bool:
        text = os.path.abspath(os.fsdecode(path))
        return any(text.startswith(str(root) + os.sep) for root in self.roots)

    def _wrapped(self, name: str, function: Any, *, of_descriptor: bool = False) -> Any:
        def operation(target: Any, *args: Any, **options: Any) -> Any:
            path = target
            if of_descriptor or isinstance(target, int):
                path = self._path_of(target)
            if path is not None and not options.get("dir_fd"):
                self.happen(name, path)
            return function(target, *args, **options)

        return operation

    def _path_of(self, descriptor: int) -> str | None:
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return None

    def _open_descriptor(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & _WRITING and not isinstance(path, int) and options.get("dir_fd") is None:
            self.happen("open", path)
        return self._os_open(path, flags, *args, **options)

    def _open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        writes = any(letter in mode for letter in "wax+")
        if not writes or isinstance(file, int) or not self._below(file) or self._quiet:
            return self._open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        self.happen("open", file)
        raw = _CountedFile(file, mode.replace("b", "").replace("t", ""), self, opener)
        if buffering == 0:
            return raw
        if "+" in mode:
            buffered: Any = io.BufferedRandom(raw)
        else:
            buffered = io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline, buffering == 1)

    def _serialize_file(self, tensors: Any, filename: Any, *args: Any, **options: Any) -> None:
        def half() -> None:
            self._serialize(tensors, filename, *args, **options)
            os.truncate(filename, os.path.getsize(filename) // 2)

        try:
            self.happen("write", filename, half)
        except OSError as error:  # imitate how safetensors reports an error of the operating system
            from safetensors import SafetensorError

            system = f'Os {{ code: {error.errno}, kind: Other, message: "{error.strerror}" }}'
            raise SafetensorError(f"Error while serializing: I/O error: {system}") from None
        self._serialize(tensors, filename, *args, **options)


class _CountedFile(io.FileIO):
    def __init__(self, file: Any, mode: str, faults: FileFaults, opener: Any) -> None:
        self.faults, self.path = faults, file
        faults._quiet, before = True, faults._quiet  # `_open_file` has already counted this open
        try:
            super().__init__(file, mode, opener=opener)
        finally:
            faults._quiet = before

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.faults.happen(
            "write", self.path, lambda: super(_CountedFile, self).write(view[: len(view) // 2])
        )
        return super().write(data)
