"""Damaged archives: `oelm archive merge` must refuse them and write nothing, or merge the original content.

Hostile archives, which are made by hand, are in tests/runs/test_archive.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .arena import Arena
from .driver import Case, Wrong, oelm


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield 300 damaged archives (12 in the short form); ignores `count`."""
    rng = arena.rng("archives")
    for number in range(12 if arena.short else 300):
        damage = ("bit", "cut", "zero")[number % 3]
        yield case(arena, f"{damage}:{rng.randrange(1000)}:{rng.randrange(8)}")


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name: DAMAGE:PERMILLE:BIT.

    PERMILLE is the place of the damage as a share of the archive's length.
    """
    return Case("archives", name, lambda place: _damaged(arena, name, place))


def _damaged(arena: Arena, name: str, place: Path) -> str:
    """Check that a damaged archive is refused, or that every merged file has its original content."""
    from .flips import hurt

    damage, permille, bit = name.split(":")
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
