"""Pack run folders into one tar.gz file (an archive), and read such a file.

The first member of the tar file is an index: every file with its size and SHA-256. An archive may come from
an untrusted source, so only files of run folders are accepted (`RESULT_FILES`, and models as safetensors,
json or txt), and their sizes and hashes are checked. `merge.py` adds the runs to a runs folder.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from oelm.errors import OelmError, UsageError
from oelm.files.atomic import atomic_open
from oelm.files.checksums import file_sha256
from oelm.files.read import MIB, TOKENIZER_BYTES, decode, parse_json
from oelm.runs.folder import RunFolder
from oelm.runs.layout import RESULT_FILES, RUN_PLACE, match_run_place
from oelm.runs.scan import RunInfo, scan
from oelm.runs.schema import from_json, to_json
from oelm.units import bytes_text

INDEX = "oelm-archive.json"
FORMAT = 1

_INDEX_BYTES = 32 * MIB  # largest accepted index; enough for 15,000 runs with 12 files each
_MODEL_FILES = {".safetensors": 1 << 40, ".json": TOKENIZER_BYTES, ".txt": TOKENIZER_BYTES}
_MAX_RATIO = 200  # largest accepted ratio of unpacked to packed size; usual archives have a ratio of 10
_ALWAYS_ALLOWED = 64 * MIB  # an archive with a smaller unpacked size is accepted, whatever its ratio
_MEMBER_OVERHEAD = 8192  # bytes of tar headers and padding per file
_CHUNK = 1 << 20


@dataclass
class Packed:
    """The archive that `pack()` has written: its path and size, and the number of runs and files in it.

    damaged: a message for each finished run with files that do not match their checksums
    """

    path: Path
    runs: int
    files: int
    bytes: int
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One file in the index of an archive."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """The first member of an archive: the list of all other members, with their sizes and hashes."""

    files: tuple[Entry, ...]
    study: str | None = None
    weights: bool = False
    format: int = FORMAT

    @property
    def runs(self) -> dict[str, list[Entry]]:
        """The index entries grouped by run: {path of a run folder, relative to the runs folder: entries}."""
        found: dict[str, list[Entry]] = {}
        for entry in self.files:
            found.setdefault(entry_run(entry.path) or "", []).append(entry)
        return found

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


# -- packing ------------------------------------------------------------------------------------


def pack(root: Path | str, target: Path | str, *, study: str = "", weights: bool = False) -> Packed:
    """Write the run folders below `root` to the archive `target`.

    `study` limits the archive to the runs of one study. `weights` adds the best model of each run.
    """
    root, target = Path(root), Path(target)
    runs = [
        run for run in scan(root) if (not study or run.study == study) and isinstance(run.reader, RunFolder)
    ]
    if not runs:
        of_study = f" of study {study}" if study else ""
        raise OelmError(f"no run folders{of_study} in {root}; give a different folder with --runs")
    live = [run.name for run in runs if run.state in ("running", "stalled")]
    if live:
        raise OelmError(
            f"these runs are still running: {', '.join(live)}. Make the archive when they have ended"
        )
    entries = []
    for run in runs:
        for file in _files_to_pack(run, weights):
            path = file.relative_to(root).as_posix()
            if entry_run(path) is None:
                raise OelmError(
                    f"{file}: the folder name is not allowed in an archive: rename the folder to "
                    "<study>/<ID>/scale=<scale>/seed=<number>"
                )
            entries.append(Entry(path, file.stat().st_size, file_sha256(file)))
    index = to_json(Index(tuple(entries), study or None, weights))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Modification times are 0 and members are sorted, so that the same runs always give the same bytes.
    with (
        atomic_open(target) as out,
        gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        text = json.dumps(index, indent=1).encode()
        _add(tar, INDEX, io.BytesIO(text), len(text))
        for entry in entries:
            with open(root / entry.path, "rb") as member:
                _add(tar, entry.path, member, os.fstat(member.fileno()).st_size)
    verify(target)
    damaged = [
        f"{run.path} is damaged: {'; '.join(damage.values())}"
        for run in runs
        if run.state == "finished" and (damage := run.reader.damage())
    ]
    return Packed(target, len(runs), len(entries), target.stat().st_size, tuple(damaged))


def _files_to_pack(run: RunInfo, weights: bool) -> Iterator[Path]:
    models = sorted((run.path / "best").glob("*")) if weights else []
    for file in [*models, *(run.path / name for name in sorted(RESULT_FILES))]:
        known = file.parent != run.path / "best" or file.suffix in _MODEL_FILES
        if known and file.is_file() and not file.is_symlink() and not file.name.startswith("."):
            yield file


def _add(tar: tarfile.TarFile, name: str, file: Any, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    tar.addfile(info, file)


# -- reading ------------------------------------------------------------------------------------


def verify(source: Path | str) -> Index:
    """Check every member of an archive against the archive's index, and return the index."""
    with opened(source) as (tar, index):
        read_members(tar, index, None)
    return index


class _BoundedStream:
    """A file of which at most `limit` bytes can be read; reading more raises OelmError.

    It limits the unpacked size of an archive, because a small compressed file could unpack to terabytes.
    """

    def __init__(self, file: Any, limit: int) -> None:
        self.file, self.limit = file, limit

    def read(self, size: int) -> bytes:
        content: bytes = self.file.read(size)
        self.limit -= len(content)
        if self.limit < 0:
            raise OelmError("the archive is damaged: its unpacked size is larger than its index says")
        return content


@contextlib.contextmanager
def opened(source: Path | str) -> Iterator[tuple[tarfile.TarFile, Index]]:
    """Open an archive as a stream, and yield it with its index, which must be the first member."""
    source = Path(source)
    if not source.is_file():
        raise UsageError(f"there is no archive {source}: name a file that `oelm archive pack` wrote")
    try:
        with gzip.open(source, "rb") as unzipped:
            stream = _BoundedStream(unzipped, _INDEX_BYTES + 1 * MIB)
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                first = tar.next()
                if first is None or first.name != INDEX or not _is_plain_file(first):
                    raise OelmError(
                        f"{source} was not written by `oelm archive`: it does not start with an index"
                    )
                if first.size > _INDEX_BYTES:
                    raise OelmError(
                        f"{source}: refused, because its index is larger than {bytes_text(_INDEX_BYTES)}"
                    )
                member = tar.extractfile(first)
                assert member is not None
                index = parse_index(member.read(), source)
                _check_ratio(index, source)
                stream.limit += index.bytes + _MEMBER_OVERHEAD * (len(index.files) + 2)
                yield tar, index
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, gzip.BadGzipFile):
            raise OelmError(f"{source}: {error}") from None
        raise OelmError(f"{source} is damaged or not an archive: {error}") from None


def parse_index(content: bytes, source: Path | str) -> Index:
    """Return the index of an archive from its JSON text.

    Raise OelmError if an entry is not a file of a run folder, is listed twice, or is larger than allowed.
    """
    where = f"{source}, {INDEX}"
    raw = parse_json(decode(content, where), where)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise OelmError(f"{where}: unknown archive format; this version of oelm reads only format {FORMAT}")
    index = from_json(Index, raw, where)
    if len({entry.path for entry in index.files}) < len(index.files):
        raise OelmError(f"{where}: a file is listed twice")
    for entry in index.files:
        _check_entry(entry, where)
    return index


def _check_entry(entry: Entry, where: str) -> None:
    run = entry_run(entry.path)
    if run is None:
        raise OelmError(f"{where}: refused, because '{entry.path}' is not a file of a run folder")
    if entry.bytes < 0 or re.fullmatch(r"[0-9a-f]{64}", entry.sha256) is None:
        raise OelmError(f"{where}: '{entry.path}' has an invalid size or hash; copy the archive again")
    name = entry.path.removeprefix(run + "/")
    most = RESULT_FILES.get(name, _MODEL_FILES.get(PurePosixPath(name).suffix, 0))
    if entry.bytes > most:
        raise OelmError(
            f"{where}: refused, because '{entry.path}' has {bytes_text(entry.bytes)}; the limit is "
            f"{bytes_text(most)}"
        )


_RUN_PATH = rf"(?P<run>[^/]+/{RUN_PLACE})/(?:(?P<file>[^/]+)|best/(?P<model>[A-Za-z0-9][A-Za-z0-9._-]*))"


def entry_run(path: str) -> str | None:
    """Return the run folder of the file `path` of an archive; None if archives may not contain such a file.

    >>> entry_run("paper/GPT-01/scale=mini/seed=0/best/config.json")
    'paper/GPT-01/scale=mini/seed=0'
    >>> entry_run("paper/GPT-01/scale=mini/seed=0/latest.pt"), entry_run("../.git/hooks/post-checkout")
    (None, None)
    """
    match = match_run_place(_RUN_PATH, path)
    if match is None:
        return None
    model = match["model"]
    allowed = PurePosixPath(model).suffix in _MODEL_FILES if model else match["file"] in RESULT_FILES
    return match["run"] if allowed else None


def _check_ratio(index: Index, source: Path) -> None:
    packed = source.stat().st_size
    if index.bytes > max(_ALWAYS_ALLOWED, _MAX_RATIO * packed):
        raise OelmError(
            f"{source}: refused, because its {bytes_text(packed)} would unpack to {bytes_text(index.bytes)}, "
            f"more than {_MAX_RATIO} times as much"
        )


def _is_plain_file(info: tarfile.TarInfo) -> bool:
    return info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.sparse is None


def read_members(tar: tarfile.TarFile, index: Index, into: Path | None) -> None:
    """Check every member of an archive against the index; if `into` is given, also write them there."""
    expected = {entry.path: entry for entry in index.files}
    while (info := tar.next()) is not None:  # a for loop would return the index (the first member) again
        entry = expected.pop(info.name, None)
        if entry is None or not _is_plain_file(info):
            raise OelmError(f"the archive contains '{info.name}', which its index does not list as a file")
        if info.size != entry.bytes:
            raise OelmError(f"the archive is damaged: '{info.name}' does not have the size in the index")
        member = tar.extractfile(info)
        assert member is not None
        digest = hashlib.sha256()
        with contextlib.ExitStack() as stack:
            out = None
            if into is not None:
                (into / info.name).parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(open(into / info.name, "xb"))
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                if out:
                    out.write(chunk)
            if out:
                out.flush()
                os.fsync(out.fileno())
        if digest.hexdigest() != entry.sha256:
            raise OelmError(f"the archive is damaged: '{info.name}' does not have the hash in the index")
    if expected:
        raise OelmError(f"the archive is incomplete: '{next(iter(expected))}' is missing")
