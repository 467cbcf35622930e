"""Results files (results/<study>.jsonl.xz): the results of a study in one small file.

Each line is a JSON object about one run: {"run": "<ID>/scale=<s>/seed=<n>", "files": {name: text},
"sha256": {name: hash of the text}}. A text is the content of one file of the run folder. A results file may
come from an untrusted source, so `read_results_file()` checks every hash, limits the size, and accepts only
the names of files that a run folder can contain.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from oelm.errors import OelmError, UsageError
from oelm.files.atomic import atomic_open
from oelm.files.read import MIB, decode, open_regular, parse_json
from oelm.runs.layout import RESULT_FILES, RUN_PLACE, match_run_place
from oelm.runs.reader import RunReader

SUFFIX = ".jsonl.xz"
MAX_BYTES = 512 * MIB  # largest unpacked size of a results file; a run takes about 20 KiB
MAX_LINE_BYTES = 64 * MIB
_MEMORY_BYTES = 128 * MIB  # memory limit of the xz decompressor
_CHUNK = 1 << 20


class StoredRun(RunReader):
    """One run of a results file.

    Its `path` is that of a run folder next to the results file, although no such folder exists.
    """

    def __init__(self, file: Path, place: re.Match[str], files: Mapping[str, str]) -> None:
        super().__init__(file.parent / file.name.removesuffix(SUFFIX) / place[0], file)
        self.place, self.files = place[0], files
        self.id, self.scale, self.seed, self.trial = (
            *place.group("id", "scale"),
            int(place["seed"]),
            place["trial"] or "",
        )

    def open(self, name: str) -> IO[bytes]:
        if name not in self.files:
            raise FileNotFoundError(f"{self.path / name}")
        return io.BytesIO(self.files[name].encode())

    def exists(self, name: str = "config.yaml") -> bool:
        return name in self.files

    def damage(self) -> dict[str, str]:
        return {}  # `read_results_file()` has checked every hash

    def size(self) -> int:
        return sum(len(text.encode()) for text in self.files.values())


def write_results_file(path: Path, runs: Mapping[str, Mapping[str, str]]) -> None:
    """Write the results file `path`; `runs` is {path of a run below its study: {file name: text}}.

    The same runs always give the same bytes, because no times are stored and the runs are sorted.
    """
    lines = []
    for place, files in sorted(runs.items(), key=lambda run: run[0].split("/")):
        hashes = {name: _sha256(text) for name, text in files.items()}
        line = {"run": place, "files": dict(files), "sha256": hashes}
        lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
    with atomic_open(path) as file:
        file.write(lzma.compress("".join(lines).encode(), preset=9))


def read_results_file(path: Path) -> list[StoredRun]:
    """Return all runs of a results file. Raise OelmError if the file is damaged or has unexpected content."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}: name a file that `oelm archive keep` wrote")
    try:
        return [_parse_run(path, line, number) for number, line in enumerate(_lines(path), 1)]
    except (lzma.LZMAError, EOFError) as error:
        raise OelmError(f"{path} is damaged or not an xz file ({error}); restore it from a copy") from None


def _lines(path: Path) -> Iterator[bytes]:
    """Decompress a results file and yield its lines. Raise OelmError if `MAX_BYTES` bytes are exceeded."""
    unpacker = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
    rest, total = b"", 0
    with open_regular(path) as file:
        while not unpacker.eof:
            packed = file.read(_CHUNK) if unpacker.needs_input else b""
            if unpacker.needs_input and not packed:
                raise EOFError("the end of the file is missing")
            unpacked = unpacker.decompress(packed, max_length=_CHUNK)
            total += len(unpacked)
            *lines, rest = (rest + unpacked).split(b"\n")
            if total > MAX_BYTES or len(rest) > MAX_LINE_BYTES:
                raise OelmError(
                    f"{path}: refused, because it unpacks to more than {MAX_BYTES // MIB} MiB, or to a line "
                    f"of more than {MAX_LINE_BYTES // MIB} MiB"
                )
            yield from lines
        if rest or unpacker.unused_data or file.read(1):
            raise EOFError("there is data after the last run")


def _parse_run(path: Path, line: bytes, number: int) -> StoredRun:
    """Return the run that one line of a results file contains, after checking its hashes."""
    where = f"{path}, line {number}"
    value = parse_json(decode(line, where), where)
    fields = value if isinstance(value, dict) else {}
    place, files, hashes = (fields.get(name) for name in ("run", "files", "sha256"))
    if not isinstance(place, str) or not isinstance(files, dict) or not isinstance(hashes, dict):
        raise OelmError(f"{where}: expected a JSON object with the fields run, files and sha256")
    match = match_run_place(RUN_PLACE, place)
    if match is None:
        raise OelmError(f"{where}: refused, because this is not the path of a run: {place!a:.200}")
    for name, text in files.items():
        if name not in RESULT_FILES or not isinstance(text, str):
            raise OelmError(
                f"{where}: not read, because it contains {name!a:.200}, which is not a text file of a run "
                "folder"
            )
        if hashes.get(name) != _sha256(text):
            raise OelmError(
                f"{where}: {place}/{name} has changed since it was written; restore the results file from "
                "a copy"
            )
    return StoredRun(path, match, files)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
