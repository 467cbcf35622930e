"""Hostile and damaged archives: `oelm archive verify` and `merge` must refuse them and write nothing."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .arena import Arena
from .driver import Case, Wrong, oelm

RUN = "paper/GPT-02/scale=smoke/seed=0"
Member = tuple[tarfile.TarInfo, bytes]


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield a case per hostile archive and 300 damaged archives (12 in the short form); ignores `count`."""
    for name in HOSTILE:
        yield case(arena, f"hostile:{name}")
    rng = arena.rng("archives")
    for number in range(12 if arena.short else 300):
        damage = ("bit", "cut", "zero")[number % 3]
        yield case(arena, f"damaged:{damage}:{rng.randrange(1000)}:{rng.randrange(8)}")


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name: hostile:WHAT or damaged:DAMAGE:PERMILLE:BIT.

    PERMILLE is the place of the damage as a share of the archive's length.
    """
    how, _, rest = name.partition(":")
    if how == "hostile":
        return Case("archives", name, lambda place: _hostile(rest, place))
    return Case("archives", name, lambda place: _damaged(arena, rest, place))


def _hostile(what: str, place: Path) -> str:
    """Check that a hostile archive is refused and that no file inside or next to the runs folder changes."""
    archive, runs = place / "in" / "hostile.tar.gz", place / "home" / "runs"
    archive.parent.mkdir()
    runs.mkdir(parents=True)
    archive.write_bytes(HOSTILE[what]())
    before = _tree(place / "home")
    for words in (["archive", "verify", archive], ["archive", "merge", archive, "--runs", runs]):
        oelm(words, place / "log").must_fail("hostile.tar.gz", "archive")
    if _tree(place / "home") != before:
        raise Wrong(f"the refused archive left files: {sorted(_tree(place / 'home') - before)}")
    return "refused"


def _damaged(arena: Arena, rest: str, place: Path) -> str:
    """Check that a damaged archive is refused, or that every merged file has its original content."""
    from .flips import hurt

    damage, permille, bit = rest.split(":")
    archive, runs = place / "study.tar.gz", place / "home" / "runs"
    source = arena.finished_study()
    archive.write_bytes(arena.once("archive", lambda: _packed(source, place)))
    hurt(archive, damage, int(permille), int(bit))
    ending = oelm(["archive", "merge", archive, "--runs", runs], place / "log")
    ending.must_be_clean()
    if ending.code != 0:
        ending.must_fail("study.tar.gz", "archive")
        if runs.exists() and _tree(runs):
            raise Wrong(f"the refused archive left files: {sorted(_tree(runs))}")
        return "refused"
    for file in runs.rglob("*"):
        if file.is_file() and file.read_bytes() != (source / file.relative_to(runs)).read_bytes():
            raise Wrong(f"the merged file {file} differs from the file that was packed")
    return "merged with the original content"


def _packed(source: Path, place: Path) -> bytes:
    archive = place / "packed.tar.gz"
    ending = oelm(["archive", "pack", archive, "--runs", source], place / "log")
    if ending.code != 0:
        raise RuntimeError(f"packing failed: {ending.output}")
    return archive.read_bytes()


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _entry(path: str, content: bytes, **changes: Any) -> dict[str, Any]:
    return {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} | changes


def _index(*entries: dict[str, Any], **changes: Any) -> bytes:
    index = {"format": 1, "study": None, "weights": False, "runs": 1, "files": list(entries)}
    return json.dumps(index | changes).encode()


def _file(name: str, content: bytes, **changes: Any) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in changes.items():
        setattr(info, field, value)
    return info, content


def _pack(index: bytes, *members: Member) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for info, content in (_file("oelm-archive.json", index), *members):
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()


def _one_file(name: str, content: bytes = b"{}") -> bytes:
    """Return an archive whose only fault is the name of its file."""
    return _pack(_index(_entry(name, content)), _file(name, content))


def _special(kind: bytes, target: str) -> bytes:
    """Return an archive with a link, device or folder where the index lists a regular file."""
    name = f"{RUN}/results.json"
    return _pack(_index(_entry(name, b"")), _file(name, b"", type=kind, linkname=target))


def _zeros(size: int) -> bytes:
    """Return a small archive whose only file expands to `size` zeros, although the index says 1 byte."""
    name = f"{RUN}/metrics.jsonl"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        index = _index(_entry(name, b"x"))
        tar.addfile(*((lambda i: (i[0], io.BytesIO(i[1])))(_file("oelm-archive.json", index))))
        info = tarfile.TarInfo(name)
        info.size = size
        raw.write(info.tobuf())
    head = raw.getvalue()[: raw.tell()]
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(head)
        block = bytes(1 << 22)
        for _ in range(size // len(block)):
            file.write(block)
    return packed.getvalue()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "parent": lambda: _one_file("../../outside/results.json"),
    "inner parent": lambda: _one_file("paper/../../outside.json"),
    "absolute": lambda: _one_file("/tmp/oelm-torture-outside"),
    "backslash": lambda: _one_file("paper\\..\\..\\outside"),
    "no run": lambda: _one_file("results.json"),
    "hidden study": lambda: _one_file(".git/hooks/post-checkout", b"#!/bin/sh\n"),
    "program": lambda: _one_file(f"{RUN}/best/modeling_evil.py", b"import os\n"),
    "pickle": lambda: _one_file(f"{RUN}/latest.pt", b"cos\nsystem\n(S'true'\ntR."),
    "lock": lambda: _one_file(f"{RUN}/lock", b'{"pid": 1}'),
    "nul in name": lambda: _pack(_index(_entry(f"{RUN}/a\0b", b"")), _file(f"{RUN}/a", b"")),
    "empty name": lambda: _one_file("", b""),
    "long name": lambda: _one_file(f"{RUN}/{'x' * 5000}"),
    "deep name": lambda: _one_file("/".join(["x"] * 3000)),
    "newline": lambda: _one_file(f"{RUN}/a\nb.json"),
    "symbolic link": lambda: _special(tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": lambda: _special(tarfile.LNKTYPE, "oelm-archive.json"),
    "device": lambda: _special(tarfile.CHRTYPE, ""),
    "fifo": lambda: _special(tarfile.FIFOTYPE, ""),
    "folder": lambda: _special(tarfile.DIRTYPE, ""),
    "wrong hash": lambda: _pack(
        _index(_entry(f"{RUN}/results.json", b"one")), _file(f"{RUN}/results.json", b"two")
    ),
    "missing": lambda: _pack(_index(_entry(f"{RUN}/results.json", b"{}"))),
    "unlisted": lambda: _pack(_index(), _file(f"{RUN}/results.json", b"{}")),
    "twice": lambda: _pack(
        _index(_entry(f"{RUN}/a.json", b"1")), _file(f"{RUN}/a.json", b"1"), _file(f"{RUN}/a.json", b"1")
    ),
    "file as folder": lambda: _pack(
        _index(_entry(f"{RUN}/a", b"1"), _entry(f"{RUN}/a/b", b"1")),
        _file(f"{RUN}/a", b"1"),
        _file(f"{RUN}/a/b", b"1"),
    ),
    "other case": lambda: _pack(
        _index(_entry(f"{RUN}/A.json", b"1", sha256="0" * 64)), _file(f"{RUN}/a.json", b"1")
    ),
    "bomb": lambda: _zeros(1 << 28),
    "index bomb": lambda: _pack(b" " * (64 << 20) + _index()),
    "index list": lambda: _pack(b"[]"),
    "index null files": lambda: _pack(_index(files=None)),
    "index without files": lambda: _pack(b'{"format": 1}'),
    "index text files": lambda: _pack(_index(files="abc")),
    "index odd entries": lambda: _pack(_index(files=[1, None, {}, {"path": 3}])),
    "index deep": lambda: _pack(b"[" * 100_000),
    "index nan": lambda: _pack(_index(files=[{"path": f"{RUN}/a", "bytes": float("nan"), "sha256": None}])),
    "index format text": lambda: _pack(_index(format="1")),
    "index not utf-8": lambda: _pack(b"\xff\xfe{}"),
    "index twice": lambda: _pack(_index(), _file("oelm-archive.json", _index())),
    "empty": lambda: b"",
    "not gzip": lambda: b"hello world" * 100,
    "gzip of nothing": lambda: gzip.compress(b""),
    "gzip of noise": lambda: gzip.compress(bytes(range(256)) * 100),
}
