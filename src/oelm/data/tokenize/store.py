"""Store arrays on disk with checksums. The token cache consists of such stores.

A store is a folder with one binary file per column (array) and meta.json, which contains the SHA-256 of each
column and of meta.json itself. While a store is being written, its folder is named `<name>.part` and contains
journal.json: the state at the last commit. If the writing process is killed, the next process continues from
this state. The finished folder is renamed to `<name>`. A lock ensures that only one process writes a store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oelm.errors import OelmError
from oelm.files.atomic import remove_leftovers, write_json
from oelm.files.checksums import file_sha256_once, is_sealed, seal
from oelm.files.locks import Lock
from oelm.files.read import read_json_object

_ABANDONED_SECONDS = 3600.0  # temporary files older than this come from killed processes and are deleted


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """Return the cache folder: `cache_dir` if given, else OELM_CACHE_DIR if set, else ~/.cache/oelm."""
    return Path(cache_dir or os.environ.get("OELM_CACHE_DIR") or "~/.cache/oelm").expanduser()


class Store:
    """A finished store. `store["ids"]` returns the column "ids" as a read-only memory map."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = read_json_object(folder / "meta.json")

    def __getitem__(self, column: str) -> np.ndarray:
        dtype, count = self.meta["columns"][column]
        if not count:
            return np.zeros(0, dtype=dtype)  # an empty file cannot be memory-mapped
        return np.memmap(self.folder / f"{column}.bin", dtype=dtype, mode="r", shape=(count,))


def open_store(folder: Path) -> Store | None:
    """Return the store in `folder`; None if it does not exist, or (with a warning) if it is damaged.

    The SHA-256 of each column is checked once per process.
    """
    try:
        store = Store(folder)
        problem = _find_damage(store)
    except FileNotFoundError:
        return None
    except (OelmError, OSError, ValueError, KeyError, TypeError) as error:
        problem = str(error)
    if problem:
        logging.getLogger(__name__).warning("%s is damaged: %s. It is created again.", folder, problem)
        return None
    return store


def _find_damage(store: Store) -> str:
    """Return what is wrong with the files of a store; "" if nothing is wrong."""
    if not is_sealed(store.meta):
        return "meta.json has changed since it was written"
    for column, (dtype, count) in store.meta["columns"].items():
        path = store.folder / f"{column}.bin"
        if path.stat().st_size != np.dtype(dtype).itemsize * count:
            return f"the size of {path.name} has changed since it was written"
        if file_sha256_once(path) != store.meta["column_sha256"][column]:
            return f"{path.name} has changed since it was written"
    return ""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock for writing the store in `folder`; wait while another process holds the lock.

    Raise OelmError if the cache folder cannot be written to, or if its disk is full.
    """
    lock = Lock(folder.with_name(folder.name + ".lock"))
    try:
        lock.__enter__()
        for place in (folder.parent, folder):
            remove_leftovers(place, min_age=_ABANDONED_SECONDS)
    except OSError as error:
        raise OelmError(
            f"cannot write to the cache {folder.parent} ({error.strerror}): "
            "set OELM_CACHE_DIR or --cache-dir to a writable folder"
        ) from error
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OelmError(
            f"the disk of the cache {folder.parent} is full: free some space and run the command again to "
            "continue, or set OELM_CACHE_DIR to a folder on another disk"
        ) from error
    finally:
        lock.__exit__(None, None, None)


class StoreWriter:
    """Writes a store. Use it inside `with locked(folder)`.

    state: the argument of the last `commit()`, also if it was called by a process that was killed since
    """

    def __init__(self, folder: Path, columns: Mapping[str, str]) -> None:
        self._folder = folder
        self._part = folder.with_name(folder.name + ".part")
        self._dtypes = {name: np.dtype(dtype) for name, dtype in columns.items()}
        self.state: dict[str, Any] = {}
        self._counts = dict.fromkeys(columns, 0)
        self._hashes = {name: hashlib.sha256() for name in columns}
        self._recover()
        self._files = {name: open(self._path(name), "ab") for name in columns}  # noqa: SIM115 (closed by `close`)

    def _path(self, column: str) -> Path:
        return self._part / f"{column}.bin"

    def _recover(self) -> None:
        """Continue from the last commit of a killed process, or start with empty columns."""
        try:
            journal = read_json_object(self._part / "journal.json")
            if not is_sealed(journal):
                raise ValueError("journal.json has changed since it was written")
            for name in self._counts:
                count = int(journal["counts"][name])
                size = count * self._dtypes[name].itemsize
                os.truncate(self._path(name), size)  # remove elements that were added after the last commit
                with open(self._path(name), "rb") as file:
                    self._hashes[name] = hashlib.file_digest(file, "sha256")
                if self._hashes[name].hexdigest() != journal["column_sha256"][name]:
                    raise ValueError(f"{name}.bin does not match journal.json")
                self._counts[name] = count
            self.state = journal["state"]
            remove_leftovers(self._part)
        except (OelmError, OSError, ValueError, KeyError, TypeError):  # no valid journal, so start again
            shutil.rmtree(self._part, ignore_errors=True)
            self._part.mkdir(parents=True)
            self._counts = dict.fromkeys(self._counts, 0)
            self._hashes = {name: hashlib.sha256() for name in self._counts}
            self.state = {}

    def count(self, column: str) -> int:
        return self._counts[column]

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Append `arrays` to the columns. After a crash, elements after the last `commit()` are lost."""
        for name, array in arrays.items():
            content = array.astype(self._dtypes[name], copy=False).tobytes()
            self._files[name].write(content)
            self._hashes[name].update(content)
            self._counts[name] += len(array)

    def commit(self, state: dict[str, Any]) -> None:
        """Flush all appended elements to disk, and record their number and `state` in journal.json."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.state = state
        journal = {"counts": self._counts, "column_sha256": self._column_sha256(), "state": state}
        write_json(self._part / "journal.json", seal(journal))

    def finish(self, meta: Mapping[str, Any]) -> Store:
        """Write meta.json, rename the folder to its final name, return the store. Call `commit()` first."""
        columns = {name: [self._dtypes[name].str, count] for name, count in self._counts.items()}
        self.close()
        facts = {**meta, "columns": columns, "column_sha256": self._column_sha256()}
        write_json(self._part / "meta.json", seal(facts))
        (self._part / "journal.json").unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)  # delete a damaged store, if there is one
        os.rename(self._part, self._folder)
        return Store(self._folder)

    def _column_sha256(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
