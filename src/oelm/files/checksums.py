"""Write and check checksums.json, which lists the SHA-256 of each file in a folder.

The folder of a finished run contains checksums.json, and so does the folder of the run's best model. The file
also contains the hash of its own content, so that damage to checksums.json is distinguished from damage to
the listed files. Checksums detect bad disks, incomplete copies and accidental edits, but do not protect
against an attacker.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from oelm.errors import OelmError
from oelm.files.atomic import write_json
from oelm.files.read import read_json_object

CHECKSUMS = "checksums.json"
_FORMAT = 1
_hashed: dict[tuple[int, int, int, int], str] = {}


def file_sha256(path: Path | str) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_sha256_once(path: Path | str) -> str:
    """Return the SHA-256 of a file, cached until the file's inode, size or modification time changes."""
    stat = Path(path).stat()
    key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if key not in _hashed:
        _hashed[key] = file_sha256(path)
    return _hashed[key]


def seal(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return `facts` with the hash of their content added as the field "sha256".

    >>> is_sealed(seal({"rows": 3})), is_sealed({**seal({"rows": 3}), "rows": 4})
    (True, False)
    """
    return {**facts, "sha256": _content_sha256(facts)}


def is_sealed(facts: Any) -> bool:
    """Return whether the field "sha256" of `facts` is the hash of its other fields, as `seal()` sets it."""
    return isinstance(facts, dict) and facts.get("sha256") == _content_sha256(facts)


def _content_sha256(facts: Mapping[str, Any]) -> str:
    content = {name: value for name, value in facts.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_checksums(folder: Path | str, names: Iterable[str] | None = None) -> None:
    """Write checksums.json for the files `names` that exist in `folder`; None means all files in it."""
    folder = Path(folder)
    if names is None:
        files = (path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
        names = [str(PurePosixPath(path.relative_to(folder))) for path in files]
    hashes = {name: file_sha256(folder / name) for name in sorted(names) if (folder / name).is_file()}
    write_json(folder / CHECKSUMS, seal({"format": _FORMAT, "files": hashes}))


def find_damage(folder: Path | str) -> dict[str, str] | None:
    """Return {file name: message} of the files listed in checksums.json that are missing or changed.

    If checksums.json itself is damaged, the result has only an entry for checksums.json. If checksums.json
    does not exist, the result is None.
    """
    try:
        listed = read_json_object(f"{folder}/{CHECKSUMS}")
    except FileNotFoundError:
        return None
    except (OelmError, OSError) as error:
        return {CHECKSUMS: f"{CHECKSUMS} cannot be read ({error})"}
    if not is_sealed(listed) or not isinstance(listed.get("files"), dict):
        return {CHECKSUMS: f"{CHECKSUMS} is damaged"}
    found = {name: _problem(folder, name, sha256) for name, sha256 in listed["files"].items()}
    return {name: problem for name, problem in found.items() if problem}


def _problem(folder: Path | str, name: str, sha256: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        return f"{CHECKSUMS} lists {name}, which is outside the folder"
    path = f"{folder}/{name}"
    if not os.path.isfile(path):
        return f"{name} is missing"
    try:
        return "" if file_sha256(path) == sha256 else f"{name} has changed since it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
