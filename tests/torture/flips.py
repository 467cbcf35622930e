"""Damaged files: bits are flipped, bytes are set to zero, ends are cut off, or whole files are emptied.

Every file of finished and half-finished runs, of a saved model and of the token cache is damaged. Commands
must then show the same results as before, or name the damaged file in an error or warning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .arena import Arena, copy
from .driver import Case, Ending, Wrong, oelm, sample
from .shown import must_show_the_same

DAMAGES = ("bit", "zero", "cut", "empty")
PLACES = ("finished", "half", "cache", "model")
PROMPT = ("--prompt", "Once upon a time", "--tokens", "12", "--temperature", "0", "--json")


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield `count` cases per place, each in another file; with count=0, 24 cases for every file."""
    for where in PLACES:
        files = _files(arena, where)
        for file in sample(arena.rng("flips", where), files, count):
            rng = arena.rng("flips", where, file)
            for number in range(1 if count else 24):
                damage = rng.choice(DAMAGES) if count else DAMAGES[number % 4]
                yield case(arena, f"{where}:{damage}:{rng.randrange(1000)}:{rng.randrange(8)}:{file}")


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name: PLACE:DAMAGE:PERMILLE:BIT:FILE.

    PERMILLE is the place of the damage as a share of the file's length, BIT the number of the flipped bit.
    """
    where, damage, permille, bit, file = name.split(":", 4)
    act = {"finished": _finished, "half": _half, "cache": _cache, "model": _model}[where]

    def run(place: Path) -> str:
        source = _source(arena, where)
        damaged = copy(source, place / "copy")
        if not hurt(damaged / file, damage, int(permille), int(bit)):
            return "the damage changes nothing"
        return act(arena, damaged, file, place)

    return Case("flips", name, run)


def hurt(path: Path, damage: str, permille: int, bit: int) -> bool:
    """Damage a file; return whether its content has changed."""
    before = path.read_bytes()
    at = min(len(before) - 1, len(before) * permille // 1000)
    content = bytearray(before)
    if damage == "empty" or not content:
        content = bytearray()
    elif damage == "cut":
        del content[at:]
    elif damage == "zero":
        content[at : at + 8] = bytes(len(content[at : at + 8]))
    else:
        content[at] ^= 1 << bit
    path.unlink()  # damage only this name: latest.pt and previous.pt may be hard links to one file
    path.write_bytes(content)
    return bytes(content) != before


def _source(arena: Arena, where: str) -> Path:
    if where == "finished":
        return arena.finished_study()
    if where == "half":
        return arena.half_finished("cls")
    if where == "model":
        return arena.reference("lm").parents[3]
    arena.reference("cls")
    return arena.cache


def _files(arena: Arena, where: str) -> list[str]:
    root = _source(arena, where)
    below = root
    if where == "finished":
        below = arena.folder("cls", root)
    elif where == "model":
        below = arena.folder("lm", root) / "best"
    files = [path for path in sorted(below.rglob("*")) if path.is_file() and path.stat().st_size]
    return [str(path.relative_to(root)) for path in files if path.name != "lock"]


def _finished(arena: Arena, runs: Path, file: str, place: Path) -> str:
    return must_show_the_same(arena, runs, runs / file, place)


def _half(arena: Arena, runs: Path, file: str, place: Path) -> str:
    """Resume a half-finished run; it must end equal to the reference, or name the damaged file."""
    ending = oelm(arena.train("cls", runs), place / "log")
    return _equal_or_named(arena, runs, file, ending, runs / file)


def _cache(arena: Arena, cache: Path, file: str, place: Path) -> str:
    """Start a new run with a damaged token cache; it must end equal, or name the damaged file."""
    ending = oelm(arena.train("cls", place / "runs", cache=cache), place / "log")
    return _equal_or_named(arena, place / "runs", file, ending, cache / file)


def _equal_or_named(arena: Arena, runs: Path, file: str, ending: Ending, path: Path) -> str:
    ending.must_be_clean()
    arena.must_not_seem_alive("cls", runs)
    if ending.code != 0:
        ending.must_fail(Path(file).name, str(path.parent))
        return "refused, file named"
    arena.must_be_equal("cls", runs)
    return "equal"


def _model(arena: Arena, runs: Path, file: str, place: Path) -> str:
    """Generate text with a damaged model; it must be the same text, or an error must name the file."""
    ending = oelm(["generate", arena.folder("lm", runs), *PROMPT], place / "log")
    ending.must_be_clean()
    if ending.code != 0:
        ending.must_fail(Path(file).name, str((runs / file).parent))
        return "refused, file named"
    text = arena.once(
        "text", lambda: _text(oelm(["generate", arena.reference("lm"), *PROMPT], place / "log"))
    )
    if _text(ending) != text:
        raise Wrong("`oelm generate` writes a different text without an error")
    return "the same text"


def _text(ending: Ending) -> str:
    return str(json.loads(ending.output)["text"])
