"""Add the runs of an archive, or of a results file, to a runs folder.

`oelm archive pack` writes archives and `oelm archive keep` writes results files. Both may come from an
untrusted source: all hashes are checked before a file is moved into the runs folder, and nothing there is
overwritten. A new run is moved as one folder, so that a killed merge leaves no partial runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from oelm.errors import OelmError
from oelm.files.checksums import file_sha256
from oelm.runs.archives.archive import Entry, entry_run, opened, read_members
from oelm.runs.archives.results_file import SUFFIX, StoredRun, read_results_file
from oelm.runs.folder import RunFolder
from oelm.runs.lock import Busy, RunLock, is_held
from oelm.units import bytes_text

_STAGING = ".merge-"


@dataclass
class Merged:
    """The paths, relative to the runs folder, of the files that `merge()` added or did not add."""

    added: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)  # files that already existed with the same content
    conflicts: list[str] = field(default_factory=list)  # files that already existed with different content
    withheld: list[str] = field(default_factory=list)  # files not added, because their run has a conflict


def merge(source: Path | str, root: Path | str) -> Merged:
    """Add the runs of an archive or of a results file to the runs folder `root`; return what was added.

    If any hash in `source` is wrong, nothing is added.
    """
    source, root = Path(source), Path(root)
    result = Merged()
    if source.name.endswith(SUFFIX):
        _merge_results_file(source, root, result)
    else:
        _merge_archive(source, root, result)
    return result


def _merge_archive(source: Path, root: Path, result: Merged) -> None:
    with opened(source) as (tar, index), _staging_folder(root, index.bytes) as staging:
        read_members(tar, index, staging)
        for run, entries in index.runs.items():
            _refuse_links(root, root / run)
            _merge_run(root, run, entries, staging, result)


def _merge_results_file(source: Path, root: Path, result: Merged) -> None:
    """Make run folders from the runs of a results file.

    A results file has no weights, so only the results of these runs can be used, not their models.
    """
    study = source.name.removesuffix(SUFFIX)
    runs = read_results_file(source)
    if any(entry_run(f"{study}/{run.place}/config.yaml") is None for run in runs):
        raise OelmError(f"{source}: the name of a results file is <study>{SUFFIX}; rename it")
    with _staging_folder(root, sum(run.size() for run in runs)) as staging:
        for run in runs:
            place = f"{study}/{run.place}"
            _refuse_links(root, root / place)
            if not os.path.lexists(root / place):
                _write_run_folder(staging / place, run)
                (root / place).parent.mkdir(parents=True, exist_ok=True)
                # The rename fails if another process has just created the folder.
                with contextlib.suppress(OSError):
                    os.rename(staging / place, root / place)
                    result.added += [f"{place}/{name}" for name in run.files]
                    continue
            _compare_results(root, place, run, result)


def _compare_results(root: Path, place: str, run: StoredRun, result: Merged) -> None:
    """Add an existing run to `result`: to `same` if it has the results of `run`, else to `conflicts`.

    results.json is compared; a run that diverged has none, so its other files are. manifest.json and
    status.json are not, because those of a results file lack what describes the machine of the run.
    """
    others = run.files.keys() - {"manifest.json", "status.json"}
    names = {"results.json"} if "results.json" in run.files else others
    equal = all(_content(root / place / name) == run.files[name] for name in names)
    (result.same if equal else result.conflicts).append(f"{place}/results.json")


def _content(file: Path) -> str | None:
    return file.read_bytes().decode(errors="replace") if file.is_file() else None


def _write_run_folder(path: Path, run: StoredRun) -> None:
    path.mkdir(parents=True)
    for name, text in run.files.items():
        (path / name).write_bytes(text.encode())
    RunFolder(path).write_checksums()


@contextlib.contextmanager
def _staging_folder(root: Path, size: int) -> Iterator[Path]:
    """Make a temporary folder in the runs folder `root`, for runs of `size` bytes; delete it at the end."""
    with contextlib.ExitStack() as stack:
        for folder in reversed([f for f in (root, *root.parents) if not f.exists()]):
            stack.callback(_remove_if_empty, folder)  # so that a refused archive leaves no empty folder
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        free = shutil.disk_usage(root).free
        if size > free:
            raise OelmError(
                f"{root}: the archive needs {bytes_text(size)} of disk space, but only "
                f"{bytes_text(free)} are free"
            )
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=root))
        stack.callback(shutil.rmtree, staging, ignore_errors=True)
        stack.enter_context(RunLock(staging))  # other merges delete every staging folder that is not locked
        yield staging


def _remove_leftovers(root: Path) -> None:
    """Delete the staging folders in `root` that are left over from killed merges."""
    for folder in root.glob(f"{_STAGING}*"):
        if folder.is_dir() and not folder.is_symlink() and not is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _merge_run(root: Path, run: str, entries: list[Entry], staging: Path, result: Merged) -> None:
    """Move one run from `staging` to `root`, and add its files to `result`.

    A run that does not exist in `root` is moved as one folder; of an existing run only the missing files are
    moved. If a file of the existing run differs from the archive, no file of the run is moved.
    """
    if not os.path.lexists(root / run):
        (root / run).parent.mkdir(parents=True, exist_ok=True)
        # The rename fails if another process has just created the folder: then add the missing files below.
        with contextlib.suppress(OSError):
            os.rename(staging / run, root / run)
            result.added += [e.path for e in entries]
            return
    there = [e for e in entries if os.path.lexists(root / e.path)]
    differing = [e for e in there if not _is_same(root / e.path, e)]
    result.same += [e.path for e in there if e not in differing]
    result.conflicts += [e.path for e in differing]
    # status.json marks a run as finished, so it is moved last: a killed merge must leave it unfinished.
    new = sorted((e.path for e in entries if e not in there), key=lambda path: path.endswith("/status.json"))
    if differing:
        result.withheld += new
    elif new:
        try:
            with RunLock(root / run, patience=0):
                for name in new:
                    _refuse_links(root, (root / name).parent)
                    (root / name).parent.mkdir(exist_ok=True)
                    os.rename(staging / name, root / name)
                    result.added.append(name)
        except Busy:
            result.withheld += new
            result.conflicts.append(f"{run} (another process is working on this run)")


def _is_same(place: Path, entry: Entry) -> bool:
    plain = place.is_file() and not place.is_symlink() and place.stat().st_size == entry.bytes
    return plain and file_sha256(place) == entry.sha256


def _refuse_links(root: Path, folder: Path) -> None:
    """Raise OelmError if `folder` or a parent of it below `root` is a symbolic link.

    Through such a link, a merge could write outside of `root`.
    """
    inside = folder.relative_to(root)
    for part in (inside, *inside.parents):
        if (root / part).is_symlink() and part != PurePosixPath("."):
            raise OelmError(
                f"refused, because {root / part} is a symbolic link: replace it by a folder, then merge again"
            )
