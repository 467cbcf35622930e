"""Inject faults into oelm and print how many cases of each kind were tried, survived and wrong.

The exit code is 1 if any case is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from pathlib import Path

from .arena import Arena
from .driver import Case, Tally, run_cases, scratch

KINDS = ("kills", "disk", "signals", "flips", "hostile", "archives", "ranks", "doctor")
SHORT = {  # kind -> `count` of its function `cases` with --short; each module says what 0 and more mean
    "kills": 8,
    "disk": 2,
    "signals": 1,
    "flips": 6,
    "hostile": 1,
    "archives": 0,
    "ranks": 1,
    "doctor": 0,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of faults (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="try only the sample that the test suite tries")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="stop after this time, which the kinds of faults share"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    parser.add_argument("--case", default="", metavar="KIND:NAME", help="try the case that a failure printed")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    parser.add_argument("-v", "--verbose", action="store_true", help="print a line for each case")
    args = parser.parse_args()
    kinds = [args.case.partition(":")[0]] if args.case else args.only.split(",")
    tally = Tally()
    with scratch() as place:
        arena = Arena(place, args.seed, args.short)
        end = time.monotonic() + (args.minutes * 60 or float("inf"))
        for left, kind in zip(range(len(kinds), 0, -1), kinds, strict=True):
            until = time.monotonic() + (end - time.monotonic()) / left
            run_cases(_cases(arena, kind, args), place, tally, until=until, verbose=args.verbose)
            print(f"# {kind}: {tally.tried[kind]} tried, {len(tally.wrong_of(kind))} wrong", flush=True)
    print(tally.table())
    if args.json:
        args.json.write_text(tally.to_json())
    return 1 if tally.wrong else 0


def _cases(arena: Arena, kind: str, args: argparse.Namespace) -> list[Case]:
    if kind not in KINDS:
        raise SystemExit(f"unknown kind of fault '{kind}'; valid are {', '.join(KINDS)}")
    module = importlib.import_module(f".{kind}", __package__)
    if args.case:
        return [module.case(arena, args.case.partition(":")[2])]
    cases = list(module.cases(arena, SHORT[kind] if args.short else 0))
    if args.minutes:  # in random order, so that the cases tried in the given time cover all parts of a run
        random.Random(args.seed).shuffle(cases)
    return cases


if __name__ == "__main__":
    sys.exit(main())
