"""Check that commands show the same results of a study after one of its files was changed, or warn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .arena import Arena
from .driver import Ending, Wrong, oelm

RUN = "paper/GPT-CLS-02/scale=smoke/seed=0"  # the run of the finished study that gets damaged


def must_show_the_same(arena: Arena, runs: Path, path: Path, place: Path) -> str:
    """Run `analyze`, `status` and `train` on a finished study whose file `path` was changed.

    They must show the same numbers as before, or a message that names the file or its folder; otherwise raise
    Wrong. Returns which of the two happened.
    """
    names = (path.name, str(path.parent), str(runs / RUN))
    ending, found = _analyze(runs, place / "log")
    how = "the same numbers"
    if ending.code != 0:
        ending.must_fail(*names)
        how = "refused, file named"
    elif any(RUN in text for text in found["warnings"]):
        how = "warned, file named"
    elif differing := _difference(_sound_analysis(arena, place), found):
        raise Wrong(f"`oelm analyze` shows other numbers without a warning: {differing}")
    oelm(["status", "--runs", runs], place / "log").must_be_clean()
    again = oelm(arena.train("cls", runs), place / "log")
    again.must_be_clean()
    if again.code != 0:
        again.must_fail(*names)
    elif _results(again) != _sound_results(arena, place):
        raise Wrong(f"`oelm train` shows another result without an error:\n{again.output[-800:]}")
    return how


def must_end_cleanly(arena: Arena, runs: Path, place: Path) -> str:
    """Raise Wrong unless `analyze`, `status` and `train` end with any message or result."""
    for words in (["analyze", "--all", "--runs", runs], ["status", "--runs", runs], arena.train("cls", runs)):
        ending = oelm(words, place / "log")
        if ending.code:
            ending.must_fail()
        ending.must_be_clean()
    return "no traceback"


def _analyze(runs: Path, log: Path) -> tuple[Ending, dict[str, Any]]:
    ending = oelm(["analyze", "--all", "--runs", runs, "--json"], log)
    ending.must_be_clean()
    if ending.code != 0:
        return ending, {}
    text = ending.output[ending.output.index("{") :]
    # Paths are replaced, so that the analyses of a study and of its copy are equal.
    return ending, json.loads(text.replace(str(runs), "RUNS"))


def _sound_analysis(arena: Arena, place: Path) -> dict[str, Any]:
    return arena.once("analysis", lambda: _analyze(arena.finished_study(), place / "log")[1])


def _sound_results(arena: Arena, place: Path) -> list[str]:
    words = arena.train("cls", arena.finished_study())
    return arena.once("results", lambda: _results(oelm(words, place / "log")))


def _results(ending: Ending) -> list[str]:
    """Return the lines of the output of `oelm train` that show a result."""
    return [line for line in ending.output.splitlines() if line.startswith(("  validation", "  test"))]


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    pairs = zip(_lines(before), _lines(after), strict=False)
    return "; ".join(f"{a} -> {b}" for a, b in pairs if a != b)[:1500]


def _lines(found: dict[str, Any]) -> list[str]:
    kept = {name: value for name, value in found.items() if name not in ("disk_bytes", "warnings")}
    return json.dumps(kept, indent=0).splitlines()
