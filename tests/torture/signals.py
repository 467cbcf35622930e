"""Send a signal at any moment: a run must stop with a checkpoint and exit code 75, and resume exactly."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

from .arena import Arena
from .driver import Case, Ending, Wrong, oelm, sample
from .faults import FileFaults

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield `count` cases per signal, spread over the file operations of the run.

    With count=0, yield a case per signal at every fourth file operation, and 10 more at random times.
    """
    operations = arena.operations("cls")
    for name in SIGNALS:
        rng = arena.rng("signals", name)
        numbers = [f"{name}:operation:{number}" for number in range(1, len(operations) + 1)]
        for moment in sample(rng, numbers, count or len(numbers) // 4):
            yield case(arena, moment)
        for _ in range(0 if count else 10):
            yield case(arena, f"{name}:clock:{rng.randrange(1000)}")


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name: SIGNAL:operation:NUMBER or SIGNAL:clock:PERMILLE.

    NUMBER is the file operation at which the signal arrives, PERMILLE the moment as a share of the time that
    an undisturbed run takes.
    """
    number, how, at = name.split(":")
    return Case("signals", name, lambda place: _signalled(arena, number, how, int(at), place))


def _signalled(arena: Arena, name: str, how: str, at: int, place: Path) -> str:
    runs = place / "runs"
    if how == "operation":
        faults = FileFaults([runs], at, name)
        ending = oelm(arena.train("cls", runs), place / "log", faults.install)
    else:
        ending = arena.signalled("cls", place, signal.Signals[name], at)
    if ending.code in (-signal.Signals[name], 130) or (
        ending.code == 1 and "KeyboardInterrupt" in ending.output
    ):
        how_ended = _ended_outside_training(arena, runs, ending)
    else:
        ending.must_be_clean()
        how_ended = _ended_by_itself(arena, runs, ending)
    arena.must_end_equal("cls", runs, place / "log")
    return how_ended


def _ended_by_itself(arena: Arena, runs: Path, ending: Ending) -> str:
    state = arena.must_not_seem_alive("cls", runs)
    if ending.code == 0:
        arena.must_be_equal("cls", runs)
        return "finished before the signal"
    if ending.code != 75 or state != "interrupted":
        raise Wrong(
            f"exit code {ending.code} and state '{state}' instead of 75 and 'interrupted':\n"
            f"{ending.output[-1500:]}"
        )
    return "interrupted, then equal"


def _ended_outside_training(arena: Arena, runs: Path, ending: Ending) -> str:
    """Check a run that the signal killed by default: it must not have been training, so nothing is lost."""
    state = arena.must_not_seem_alive("cls", runs)
    if state not in ("absent", "pending", "broken", "finished", "interrupted"):
        raise Wrong(
            f"the signal killed the run in the middle of training: exit code {ending.code}, state '{state}'\n"
            f"{ending.output[-1500:]}"
        )
    return "ended outside training, then equal"
