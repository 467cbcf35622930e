"""Kill a run with SIGKILL at any file operation, once or several times; the same command must finish it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

from .arena import Arena
from .driver import Case, Wrong, oelm, sample
from .faults import FileFaults

MOST_KILLS = 10


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield `count` single kills spread over the file operations of the run, and one run killed repeatedly.

    With count=0, yield a kill at every operation, more repeated kills, and kills at random times.
    """
    shapes = ("cls",) if count else ("cls", "lm", "fresh")
    for shape in shapes:
        operations = _operations(arena, shape)
        names = [f"{shape}:kill:{number}" for number in range(1, len(operations) + 1)]
        writes = [n for n, text in enumerate(operations, 1) if text.startswith("write ")]
        names += [f"{shape}:half:{number}" for number in writes]
        for name in sample(arena.rng("kills", shape), names, count):
            yield case(arena, name)
    for number in range(1 if count else 20):
        for shape in shapes:
            yield case(arena, f"{shape}:chain:{arena.seed * 1000 + number}")
    rng = arena.rng("kills by the clock")
    for _ in range(0 if count else 40):
        yield case(arena, f"{rng.choice(('cls', 'lm'))}:clock:{rng.randrange(1000)}")


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name: SHAPE:kill|half:NUMBER, SHAPE:chain:SEED or SHAPE:clock:PERMILLE.

    NUMBER is the file operation at which the run is killed, PERMILLE the moment as a share of the time that
    an undisturbed run takes. "half" kills after half of a write, "chain" kills repeatedly. The shape "fresh"
    is "cls" with an empty token cache.
    """
    shape, how, number = name.split(":")
    if how == "clock":
        return Case("kills", name, lambda place: _by_the_clock(arena, shape, int(number), place))
    if how == "chain":
        return Case("kills", name, lambda place: _chain(arena, shape, int(number), place))
    return Case("kills", name, lambda place: _killed_once(arena, shape, how, int(number), place))


def _operations(arena: Arena, shape: str) -> list[str]:
    return arena.operations("cls", True) if shape == "fresh" else arena.operations(shape)


def _killed_once(arena: Arena, shape: str, how: str, number: int, place: Path) -> str:
    real, cache = ("cls", place / "cache") if shape == "fresh" else (shape, None)
    runs = place / "runs"
    faults = FileFaults([place], number, how)
    ending = oelm(arena.train(real, runs, cache=cache), place / "log", faults.install)
    if ending.code != -9:
        ending.must_be_clean()
        arena.must_be_equal(real, runs)
        return "finished before the kill"
    arena.must_not_seem_alive(real, runs)
    arena.must_end_equal(real, runs, place / "log", cache)
    return "equal after a kill"


def _chain(arena: Arena, shape: str, seed: int, place: Path) -> str:
    """Kill a run at a random operation and start it again, up to MOST_KILLS times."""
    real, cache = ("cls", place / "cache") if shape == "fresh" else (shape, None)
    runs, rng = place / "runs", arena.rng("chain", shape, seed)
    most = len(_operations(arena, shape))
    for _ in range(MOST_KILLS):
        faults = FileFaults([place], rng.randrange(1, most), rng.choice(("kill", "half")))
        ending = oelm(arena.train(real, runs, cache=cache), place / "log", faults.install)
        if ending.code == 0:
            break
        if ending.code != -9:
            ending.must_be_clean()
            raise Wrong(f"the resumed run ended with exit code {ending.code}:\n{ending.output[-2000:]}")
        arena.must_not_seem_alive(real, runs)
    arena.must_end_equal(real, runs, place / "log", cache)
    return "equal after many kills"


def _by_the_clock(arena: Arena, shape: str, permille: int, place: Path) -> str:
    """Kill a run at a given time, which is usually not in a file operation."""
    ending = arena.signalled(shape, place, signal.SIGKILL, permille)
    if ending.code == 0:
        arena.must_be_equal(shape, place / "runs")
        return "finished before the kill"
    arena.must_not_seem_alive(shape, place / "runs")
    arena.must_end_equal(shape, place / "runs", place / "log")
    return "equal after a kill"
