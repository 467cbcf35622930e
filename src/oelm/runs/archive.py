"""A study's results in one verified file, and back into another machine's runs folder.

A tar.gz whose first member lists every file with its size and SHA-256. An archive may come from anyone:
merging accepts only the files of run folders (`RESULT_FILES`, and models as safetensors, json or txt), of the
sizes that the list gives, and checks every byte before anything is put in place. A run that is not there yet
is moved in as a whole; of one that is there and differs in any file nothing is taken, and it is named.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from oelm.errors import OelmError, UsageError
from oelm.files.atomic import atomic_open
from oelm.files.read import MIB, TOKENIZER_BYTES, parse_json
from oelm.printable import printable
from oelm.runs.layout import RESULT_FILES
from oelm.runs.lock import Busy, RunLock, is_held
from oelm.runs.scan import RunInfo, scan
from oelm.units import bytes_text

INDEX = "oelm-archive.json"
FORMAT = 1

_INDEX_BYTES = 32 * MIB  # 180 bytes per file: some 15,000 runs
_MODEL_FILES = {".safetensors": 1 << 40, ".json": TOKENIZER_BYTES, ".txt": TOKENIZER_BYTES}
_MAX_RATIO = 200  # of content to archive; results compress ten times
_ALWAYS_ALLOWED = 64 * MIB  # whatever the ratio
_MEMBER_OVERHEAD = 8192  # bytes of headers and padding around one file of a tar
_STAGING = ".merge-"
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


@dataclass(frozen=True)
class Entry:
    """One file of an archive, as its index lists it."""

    path: str
    bytes: int
    sha256: str
    run: str  # the run folder it belongs to


@dataclass(frozen=True)
class Index:
    files: tuple[Entry, ...]
    study: str | None = None
    weights: bool = False

    @property
    def runs(self) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in self.files:
            found.setdefault(entry.run, []).append(entry)
        return found

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


# -- packing ------------------------------------------------------------------------------------


def pack(root: Path | str, target: Path | str, *, study: str = "", weights: bool = False) -> Packed:
    """Write the runs of `root` (of one study, if named) into `target`; best weights only on request."""
    root, target = Path(root), Path(target)
    runs = [run for run in scan(root) if not study or run.study == study]
    if not runs:
        raise OelmError(f"no runs{f' of study {study}' if study else ''} in {root}")
    live = [run.name for run in runs if run.state in ("running", "stalled")]
    if live:
        raise OelmError(f"still running, so not to be packed yet: {', '.join(live)}")
    entries = []
    for run in runs:
        for file in _files_to_pack(run, weights):
            path = file.relative_to(root).as_posix()
            if entry_run(path) is None:
                raise OelmError(f"{file}: a run in a folder of this name cannot be merged; rename it")
            entries.append({"path": path, "bytes": file.stat().st_size, "sha256": sha256(file)})
    index = {
        "format": FORMAT,
        "study": study or None,
        "weights": weights,
        "runs": len(runs),
        "files": entries,
    }
    # mtime 0 and sorted members: the same results make the same archive, byte for byte.
    with (
        atomic_open(target) as out,
        gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        text = json.dumps(index, indent=1).encode()
        _add(tar, INDEX, io.BytesIO(text), len(text))
        for name in (str(entry["path"]) for entry in entries):
            with open(root / name, "rb") as member:
                _add(tar, name, member, os.fstat(member.fileno()).st_size)
    verify(target)
    return Packed(target, len(runs), len(entries), target.stat().st_size)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """Read the whole archive and check every member against its index; returns the index."""
    with _opened(source) as (tar, index):
        _read_members(tar, index, None)
    return index


class _BoundedStream:
    """The unpacked tar; reading more than `limit` bytes is an error: some bytes may unpack to terabytes."""

    def __init__(self, file: Any, limit: int) -> None:
        self.file, self.limit = file, limit

    def read(self, size: int) -> bytes:
        content: bytes = self.file.read(size)
        self.limit -= len(content)
        if self.limit < 0:
            raise OelmError("the archive unpacks to more than its index lists")
        return content


@contextlib.contextmanager
def _opened(source: Path | str) -> Iterator[tuple[tarfile.TarFile, Index]]:
    """The archive as a stream, and its index, which must come first and be valid."""
    source = Path(source)
    if not source.is_file():
        raise UsageError(f"there is no archive {source}")
    try:
        with gzip.open(source, "rb") as unzipped:
            stream = _BoundedStream(unzipped, _INDEX_BYTES + 1 * MIB)
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                first = tar.next()
                if first is None or first.name != INDEX or not _is_plain_file(first):
                    raise OelmError(f"{source} is not an archive of `oelm archive`: it has no index")
                if first.size > _INDEX_BYTES:
                    raise OelmError(f"{source}: its index is larger than {bytes_text(_INDEX_BYTES)}")
                member = tar.extractfile(first)
                assert member is not None
                index = parse_index(member.read(), source)
                _check_ratio(index, source)
                stream.limit += index.bytes + _MEMBER_OVERHEAD * (len(index.files) + 2)
                yield tar, index
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, gzip.BadGzipFile):
            raise OelmError(f"{source}: {error}") from None
        raise OelmError(f"{source} is damaged or no archive: {error}") from None


def parse_index(content: bytes, source: Path | str) -> Index:
    """The checked index of an archive; every file listed is a file of a run folder, once, of a usual size."""
    where = f"{source}, {INDEX}"
    try:
        raw = parse_json(content.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise OelmError(f"{where}: not UTF-8 text (byte {error.start})") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise OelmError(f"{where}: of another format than this version reads ({FORMAT})")
    listed = raw.get("files")
    if not isinstance(listed, list):
        raise OelmError(f"{where}: 'files' is missing or not a list")
    entries: dict[str, Entry] = {}
    for place, item in enumerate(listed):
        entry = _entry(item, f"{where}: files[{place}]")
        if entry.path in entries:
            raise OelmError(f"{where}: '{entry.path}' is listed twice")
        entries[entry.path] = entry
    study = raw.get("study")
    return Index(
        tuple(entries.values()), study if isinstance(study, str) else None, raw.get("weights") is True
    )


def _entry(item: Any, where: str) -> Entry:
    path, size, digest = (
        item.get(n) if isinstance(item, dict) else None for n in ("path", "bytes", "sha256")
    )
    if not isinstance(path, str) or type(size) is not int or not isinstance(digest, str):
        raise OelmError(f"{where} has no valid path, bytes and sha256")
    if size < 0 or re.fullmatch(r"[0-9a-f]{64}", digest) is None:
        raise OelmError(f"{where} has no valid path, bytes and sha256")
    run = entry_run(path)
    if run is None:
        raise OelmError(f"{where}: refused, not a file of a run folder: '{path}'")
    most = RESULT_FILES.get(path.removeprefix(run + "/"), _MODEL_FILES.get(PurePosixPath(path).suffix, 0))
    if size > most:
        raise OelmError(f"{where}: refused, '{path}' has {bytes_text(size)}; at most {bytes_text(most)}")
    return Entry(path, size, digest, run)


_RUN_PATH = re.compile(
    r"(?P<run>[^/]+/[^/]+/scale=[a-z]+/(?:tune/lr=[0-9.e+-]+/)?seed=[0-9]+)/"
    r"(?:(?P<file>[^/]+)|best/(?P<model>[A-Za-z0-9][A-Za-z0-9._-]*))"
)


def entry_run(path: str) -> str | None:
    """The run folder of a path of an archive; None when it is not a file that an archive may hold.

    >>> entry_run("paper/GPT-01/scale=mini/seed=0/best/config.json")
    'paper/GPT-01/scale=mini/seed=0'
    >>> entry_run("paper/GPT-01/scale=mini/seed=0/latest.pt"), entry_run("../.git/hooks/post-checkout")
    (None, None)
    """
    match = _RUN_PATH.fullmatch(path)
    if match is None or printable(path) != path or "\\" in path or len(path) > 1000:
        return None
    if any(part.startswith((".", " ")) for part in path.split("/")):
        return None
    model = match["model"]
    allowed = PurePosixPath(model).suffix in _MODEL_FILES if model else match["file"] in RESULT_FILES
    return match["run"] if allowed else None


def _check_ratio(index: Index, source: Path) -> None:
    packed = source.stat().st_size
    if index.bytes > max(_ALWAYS_ALLOWED, _MAX_RATIO * packed):
        raise OelmError(
            f"{source}: refused, {bytes_text(packed)} that unpack to {bytes_text(index.bytes)} are no results"
        )


def _is_plain_file(info: tarfile.TarInfo) -> bool:
    return info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.sparse is None


def _read_members(tar: tarfile.TarFile, index: Index, into: Path | None) -> None:
    """Check every member against the index, writing it below `into` if given; anything else is refused."""
    expected = {entry.path: entry for entry in index.files}
    while (info := tar.next()) is not None:  # from where the index ended: iterating would start over
        entry = expected.pop(info.name, None)
        if entry is None or not _is_plain_file(info):
            raise OelmError(f"the archive holds '{info.name}', which its index does not list as a file")
        if info.size != entry.bytes:
            raise OelmError(f"the archive is damaged: '{info.name}' has not the size that its index lists")
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
            raise OelmError(f"the archive is damaged: '{info.name}' has not the content it was packed with")
    if expected:
        raise OelmError(f"the archive is incomplete: '{next(iter(expected))}' is missing")


# -- merging ------------------------------------------------------------------------------------


def merge(source: Path | str, root: Path | str) -> Merged:
    """Put the archive's runs below `root`. Nothing is written unless every hash in the archive holds."""
    root = Path(root)
    result = Merged()
    with contextlib.ExitStack() as stack:
        tar, index = stack.enter_context(_opened(source))
        for folder in reversed([f for f in (root, *root.parents) if not f.exists()]):
            stack.callback(_remove_if_empty, folder)  # a refused archive leaves no trace
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        free = shutil.disk_usage(root).free
        if index.bytes > free:
            raise OelmError(f"{root}: {bytes_text(index.bytes)} are needed, {bytes_text(free)} are free")
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=root))
        stack.callback(shutil.rmtree, staging, ignore_errors=True)
        stack.enter_context(RunLock(staging))  # another merge must not take it for a leftover
        _read_members(tar, index, staging)
        for run, entries in index.runs.items():
            _refuse_links(root, root / run)
            _merge_run(root, run, entries, staging, result)
    return result


def _remove_leftovers(root: Path) -> None:
    """Staging folders of merges that were killed."""
    for folder in root.glob(f"{_STAGING}*"):
        if folder.is_dir() and not folder.is_symlink() and not is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _merge_run(root: Path, run: str, entries: list[Entry], staging: Path, result: Merged) -> None:
    """A new run as a whole; of one that is there only what is missing, and nothing when a file differs."""
    if not os.path.lexists(root / run):
        (root / run).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another process made it meanwhile
            os.rename(staging / run, root / run)
            result.added += [e.path for e in entries]
            return
    there = [e for e in entries if os.path.lexists(root / e.path)]
    differing = [e for e in there if not _is_same(root / e.path, e)]
    result.same += [e.path for e in there if e not in differing]
    result.conflicts += [e.path for e in differing]
    # The status says that a run is over, so it comes last: a merge that is killed leaves a run to go on with.
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
            result.conflicts.append(f"{run} (being worked on)")


def _is_same(place: Path, entry: Entry) -> bool:
    plain = place.is_file() and not place.is_symlink() and place.stat().st_size == entry.bytes
    return plain and sha256(place) == entry.sha256


def _refuse_links(root: Path, folder: Path) -> None:
    """A link inside the runs folder must not lead a merge out of it."""
    inside = folder.relative_to(root)
    for part in (inside, *inside.parents):
        if (root / part).is_symlink() and part != PurePosixPath("."):
            raise OelmError(f"refused: {root / part} is a link, and the merge would write through it")
