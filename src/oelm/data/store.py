"""Arrays on disk that are either whole or clearly not yet: what token files and encoded splits are made of.

A store is a folder with one flat binary file per column and `meta.json`. It grows as `<name>.part` with a
journal of what is safely written; a killed writer's successor goes on from the journal, and the finished
folder appears by one rename. A lock keeps two writers of the same store apart.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oelm.atomic import write_json
from oelm.errors import OelmError
from oelm.locks import Lock
from oelm.safe_files import read_json_object


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """Where prepared data is kept: the argument, OELM_CACHE_DIR, or ~/.cache/oelm."""
    return Path(cache_dir or os.environ.get("OELM_CACHE_DIR") or "~/.cache/oelm").expanduser()


class Store:
    """A finished store: `store["ids"]` is a read-only memory map."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = read_json_object(folder / "meta.json")

    def __getitem__(self, column: str) -> np.ndarray:
        dtype, count = self.meta["columns"][column]
        if not count:
            return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
        return np.memmap(self.folder / f"{column}.bin", dtype=dtype, mode="r", shape=(count,))


def open_store(folder: Path) -> Store | None:
    """The store, or None when there is none or it is damaged (files shorter or longer than they were)."""
    try:
        store = Store(folder)
        for column, (dtype, count) in store.meta["columns"].items():
            if (folder / f"{column}.bin").stat().st_size != np.dtype(dtype).itemsize * count:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return store


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time builds this store; a killed one's lock vanishes with it."""
    lock = Lock(folder.with_name(folder.name + ".lock"))
    try:
        lock.__enter__()
    except OSError as error:
        elsewhere = "set OELM_CACHE_DIR or --cache-dir to a folder that can be written"
        raise OelmError(
            f"cannot write to the cache {folder.parent} ({error.strerror}); {elsewhere}"
        ) from error
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OelmError(
            f"the disk of the cache {folder.parent} is full; free some, or set OELM_CACHE_DIR to another. "
            "What is done so far is kept."
        ) from error
    finally:
        lock.__exit__(None, None, None)


class StoreWriter:
    """Appends to a store in the making. Use under `locked`."""

    def __init__(self, folder: Path, columns: Mapping[str, str]) -> None:
        self._folder = folder
        self._part = folder.with_name(folder.name + ".part")
        self._dtypes = {name: np.dtype(dtype) for name, dtype in columns.items()}
        self.state: dict[str, Any] = {}  # what the caller wants to know after a restart
        self._counts = dict.fromkeys(columns, 0)
        self._recover()
        self._files = {name: open(self._path(name), "ab") for name in columns}  # noqa: SIM115 (closed by `close`)

    def _path(self, column: str) -> Path:
        return self._part / f"{column}.bin"

    def _recover(self) -> None:
        try:
            journal = read_json_object(self._part / "journal.json")
            for name in self._counts:
                count = int(journal["counts"][name])
                size = count * self._dtypes[name].itemsize
                if self._path(name).stat().st_size < size:
                    raise ValueError("shorter than its journal")
                os.truncate(self._path(name), size)  # what was written after the last journal
                self._counts[name] = count
            self.state = journal["state"]
        except (OelmError, OSError, ValueError, KeyError, TypeError):  # nothing usable: begin anew
            shutil.rmtree(self._part, ignore_errors=True)
            self._part.mkdir(parents=True)
            self._counts = dict.fromkeys(self._counts, 0)
            self.state = {}

    def count(self, column: str) -> int:
        return self._counts[column]

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add elements to columns. They count only once `commit` has noted them."""
        for name, array in arrays.items():
            self._files[name].write(array.astype(self._dtypes[name], copy=False).tobytes())
            self._counts[name] += len(array)

    def commit(self, state: dict[str, Any]) -> None:
        """Note that everything appended so far and `state` belong together."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.state = state
        write_json(self._part / "journal.json", {"counts": self._counts, "state": state})

    def finish(self, meta: Mapping[str, Any]) -> Store:
        """Make it the finished store. Everything must have been committed."""
        columns = {name: [self._dtypes[name].str, count] for name, count in self._counts.items()}
        self.close()
        write_json(self._part / "meta.json", {**meta, "columns": columns})
        (self._part / "journal.json").unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)  # a damaged one, else there would be no need to write
        os.rename(self._part, self._folder)
        return Store(self._folder)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
