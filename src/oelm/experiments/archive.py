"""A study's results in one verified file, and back into another machine's runs folder.

A tar.gz whose first member lists every file with its size and SHA-256. Merging checks every byte against
that list before anything is put in place, names conflicts, and never overwrites: a file that is there with
the same content is skipped, one with other content is a conflict and stays as it is. Of a run with a conflict
nothing is added: results of one attempt beside the log of another would be neither's.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from oelm.atomic import atomic_open
from oelm.errors import OelmError, UsageError
from oelm.experiments.lock import is_held
from oelm.experiments.registry import Run, scan

INDEX = "oelm-archive.json"
FORMAT = 1

# Not results: another machine has no use for a lock, and checkpoints are only for going on here.
_NEVER = frozenset({"lock", "lock.owner", "latest.pt", "previous.pt"})
_CHUNK = 1 << 20


@dataclass
class Packed:
    path: Path
    runs: int
    files: int
    bytes: int


@dataclass
class Merged:
    """What a merge did, file by file (paths below the runs folder)."""

    added: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    withheld: list[str] = field(default_factory=list)  # new, but of a run with a conflict


def pack(root: Path | str, target: Path | str, *, study: str = "", weights: bool = False) -> Packed:
    """Write the runs of `root` (of one study, if named) into `target`; best weights only on request."""
    root, target = Path(root), Path(target)
    runs = [run for run in scan(root) if not study or run.study == study]
    if not runs:
        raise OelmError(f"no runs{f' of study {study}' if study else ''} in {root}")
    live = [run.name for run in runs if run.state in ("running", "stalled")]
    if live:
        raise OelmError(f"still running, so not to be packed yet: {', '.join(live)}")
    entries = [
        {
            "path": str(PurePosixPath(file.relative_to(root))),
            "bytes": file.stat().st_size,
            "sha256": sha256(file),
        }
        for run in runs
        for file in _files(run, weights)
    ]
    index = {
        "format": FORMAT,
        "study": study or None,
        "weights": weights,
        "runs": len(runs),
        "files": entries,
    }
    # mtime 0 and sorted members: the same results make the same archive, byte for byte.
    with (
        atomic_open(target) as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        text = json.dumps(index, indent=1).encode()
        _add(tar, INDEX, io.BytesIO(text), len(text))
        for name in (str(entry["path"]) for entry in entries):
            with open(root / name, "rb") as member:
                _add(tar, name, member, os.fstat(member.fileno()).st_size)
    verify(target)
    return Packed(target, len(runs), len(entries), target.stat().st_size)


def verify(source: Path | str) -> dict[str, Any]:
    """Read the whole archive and check every member against its index; returns the index."""
    with _opened(source) as (tar, index):
        _read_members(tar, index, None)
    return index


def merge(source: Path | str, root: Path | str) -> Merged:
    """Put the archive's runs below `root`. Nothing is written unless every hash in the archive holds."""
    root = Path(root)
    result = Merged()
    with contextlib.ExitStack() as stack:
        tar, index = stack.enter_context(_opened(source))
        for folder in reversed([f for f in (root, *root.parents) if not f.exists()]):
            stack.callback(_remove_if_empty, folder)  # a refused archive leaves no trace
        root.mkdir(parents=True, exist_ok=True)
        staging = stack.enter_context(tempfile.TemporaryDirectory(prefix=".merge-", dir=root))
        _read_members(tar, index, Path(staging))
        runs: dict[str, list[dict[str, Any]]] = {}
        for entry in index["files"]:
            runs.setdefault(_run_of(entry["path"]), []).append(entry)
        for run, entries in runs.items():
            _merge_run(root, run, entries, Path(staging), result)
    return result


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _merge_run(
    root: Path, run: str, entries: Sequence[dict[str, Any]], staging: Path, result: Merged
) -> None:
    """All of a run's new files, or none of them."""
    there = [e for e in entries if (root / e["path"]).exists() or (root / e["path"]).is_symlink()]
    differing = [e for e in there if not _is_same(root / e["path"], e["sha256"])]
    result.same += [e["path"] for e in there if e not in differing]
    result.conflicts += [e["path"] for e in differing]
    new = [e["path"] for e in entries if e not in there]
    if differing or (new and is_held(root / run)):
        result.withheld += new
        if not differing:
            result.conflicts.append(f"{run} (being worked on)")
        return
    for name in new:
        place = root / name
        _refuse_links(root, place)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(staging / name, place)  # fails if another process put a file there meanwhile
        except FileExistsError:
            result.conflicts.append(name)
            continue
        except OSError:  # a file system without hard links
            os.rename(staging / name, place)
        result.added.append(name)


def _is_same(place: Path, digest: str) -> bool:
    return place.is_file() and not place.is_symlink() and sha256(place) == digest


def _run_of(name: str) -> str:
    """The run folder that a file of an archive belongs to."""
    parts = PurePosixPath(name).parts
    seeds = [i for i, part in enumerate(parts) if part.startswith("seed=")]
    return "/".join(parts[: seeds[0] + 1] if seeds else parts[:-1])


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(run: Run, weights: bool) -> Iterator[Path]:
    for file in sorted(run.path.rglob("*")):
        inside = file.relative_to(run.path)
        hidden = any(part.startswith(".") for part in inside.parts)
        if file.is_symlink() or not file.is_file() or hidden or inside.name in _NEVER:
            continue
        if inside.parts[0] == "best" and not weights:
            continue
        yield file


def _add(tar: tarfile.TarFile, name: str, file: Any, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    tar.addfile(info, file)


@contextlib.contextmanager
def _opened(source: Path | str) -> Iterator[tuple[tarfile.TarFile, dict[str, Any]]]:
    """The archive as a stream, and its index, which must come first and be sound."""
    source = Path(source)
    if not source.is_file():
        raise UsageError(f"there is no archive {source}")
    try:
        with tarfile.open(source, mode="r|gz") as tar:
            first = tar.next()
            if first is None or first.name != INDEX:
                raise OelmError(f"{source} is not an archive of `oelm archive`: it has no index")
            member = tar.extractfile(first)
            assert member is not None
            index = json.loads(member.read())
            _check_index(index, source)
            yield tar, index
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, gzip.BadGzipFile):
            raise OelmError(f"{source}: {error}") from None
        raise OelmError(f"{source} is damaged or no archive: {error}") from None


def _check_index(index: Any, source: Path) -> None:
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise OelmError(f"{source}: its index is of another format than this version reads ({FORMAT})")
    for entry in index["files"]:
        path = PurePosixPath(entry["path"])
        if path.is_absolute() or ".." in path.parts or "\\" in entry["path"] or len(path.parts) < 2:
            raise OelmError(f"{source}: refused, it would write outside the runs folder: {entry['path']}")


def _read_members(tar: tarfile.TarFile, index: dict[str, Any], into: Path | None) -> None:
    """Check every member against the index, writing it below `into` if given; anything else is refused."""
    expected = {entry["path"]: entry for entry in index["files"]}
    while (info := tar.next()) is not None:  # from where the index ended: iterating would start over
        entry = expected.pop(info.name, None)
        if entry is None or not info.isreg():
            raise OelmError(f"the archive holds '{info.name}', which its index does not list as a file")
        member = tar.extractfile(info)
        assert member is not None
        digest = hashlib.sha256()
        out = None
        if into is not None:
            (into / info.name).parent.mkdir(parents=True, exist_ok=True)
            out = open(into / info.name, "xb")  # noqa: SIM115
        try:
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                if out:
                    out.write(chunk)
        finally:
            if out:
                out.close()
        if digest.hexdigest() != entry["sha256"]:
            raise OelmError(f"the archive is damaged: '{info.name}' has not the content it was packed with")
    if expected:
        raise OelmError(f"the archive is incomplete: '{next(iter(expected))}' is missing")


def _refuse_links(root: Path, place: Path) -> None:
    """A link inside the runs folder must not lead a merge out of it."""
    for parent in place.relative_to(root).parents:
        if (root / parent).is_symlink():
            raise OelmError(f"refused: {root / parent} is a link, and the merge would write through it")
