"""`oelm status`: the state of all runs, once."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from oelm.cli.options import add_json, add_runs, command_parser, require_study
from oelm.cli.output import print, print_json, print_table
from oelm.experiments.scales import SCALES
from oelm.printable import printable
from oelm.runs.scan import STATES, TROUBLE, RunInfo, scan
from oelm.units import duration_text

HEADER = ("run", "study", "state", "step", "loss", "metric", "steps/s", "ETA", "heartbeat", "reason")


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers, "status", "the state of all runs, once", "oelm status --state running stalled"
    )
    add_runs(parser)
    add_filters(parser)
    add_json(parser)


def add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--study", default="", help="only this study's runs")
    parser.add_argument(
        "--scale", choices=SCALES, metavar="SCALE", help=f"only one scale's: {', '.join(SCALES)}"
    )
    parser.add_argument(
        "--state", nargs="+", default=[], choices=STATES, metavar="STATE", help=", ".join(STATES)
    )
    parser.add_argument("--no-trials", action="store_true", help="leave tuning trials out")


def run(args: argparse.Namespace) -> int:
    runs = wanted(args)
    if args.json:
        print_json([r.to_dict() for r in runs])
        return 0
    if not runs:
        there = Path(args.runs).is_dir()
        such = " such" if args.study or args.scale or args.state else ""
        print(
            f"no{such} runs in {args.runs}" if there else f"no runs: there is no folder {args.runs} (--runs)"
        )
        return 0
    print_table(HEADER, [cells(r) for r in runs])
    print(f"\n{summary(runs)}")
    return 0


def wanted(args: argparse.Namespace) -> list[RunInfo]:
    """What the filters leave, what needs a person first."""
    runs = scan(args.runs, trials=not args.no_trials)
    require_study(args.study, runs)
    found = [
        run
        for run in runs
        if (not args.study or run.study == args.study)
        and (not args.scale or run.scale == args.scale)
        and (not args.state or run.state in args.state)
    ]
    return sorted(found, key=lambda run: STATES.index(run.state))


def cells(run: RunInfo) -> tuple[str, ...]:
    """A run's row of the table, safe to print: names and reasons come from files."""
    return tuple(printable(cell) for cell in _cells(run))


def _cells(run: RunInfo) -> tuple[str, ...]:
    status = run.status
    state = run.state.upper() if run.state in TROUBLE else run.state
    if status is None:
        return (run.name, run.study, state, "-", "-", "-", "-", "-", "-", run.reason)
    metric = status.metric
    return (
        run.name,
        run.study,
        state,
        f"{status.step}/{status.total_steps}",
        f"{status.loss:.4f}" if status.loss is not None else "-",
        f"{metric['name']} {metric['value']:.4g}" if metric else "-",
        f"{status.steps_per_second:.2f}" if status.steps_per_second else "-",
        duration_text(status.eta_seconds) if run.state == "running" else "-",
        f"{duration_text(max(0.0, time.time() - status.heartbeat))} ago" if run.state in _LIVE else "-",
        run.reason,
    )


_LIVE = ("running", "stalled", "dead")


def summary(runs: list[RunInfo]) -> str:
    counts = {state: sum(run.state == state for run in runs) for state in STATES}
    return f"{len(runs)} runs: " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
