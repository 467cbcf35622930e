"""`oelm doctor`: preflight before hours are spent."""

from __future__ import annotations

import argparse
from typing import Any

from oelm.cli.options import (
    add_changes,
    add_json,
    add_machine,
    add_runs,
    add_scale,
    add_selection,
    chosen_experiments,
    command_parser,
    machine_from,
)
from oelm.cli.output import print, print_json
from oelm.experiments.experiment import DEFAULT_SEED
from oelm.experiments.study import Request


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "doctor",
        "preflight: versions, devices, precision, disk, and for each experiment named its data, labels, "
        "tokenizer, one training step and one evaluation",
        "oelm doctor GPT-01 GPT-02 --scale mini\n  oelm doctor --all --seeds 0 1 2",
    )
    add_selection(parser)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[DEFAULT_SEED], metavar="N", help="planned seeds"
    )
    add_scale(parser)
    add_changes(parser)
    add_runs(parser)
    add_machine(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from oelm.experiments.doctor import examine

    named = args.ids or args.study or args.everything or args.phase is not None
    chosen = chosen_experiments(args) if named else []
    request = Request(
        chosen, (args.scale,), tuple(args.seeds), args.changes, args.study_name, data_dir=args.data_dir
    )
    planned = [(arm.runs[0], len(arm.runs) + len(arm.trials)) for arm in request.arms()]
    findings = []
    for finding in examine(planned, args.runs, machine_from(args)):
        findings.append(finding)
        if not args.json:
            print(f"{finding.verdict:8} {finding.subject}: {finding.text}", flush=True)
            for note in finding.notes:
                print(f"{'':8} note: {note}", flush=True)
            if finding.remedy and finding.verdict == "problem":
                print(f"{'':8} what to do: {finding.remedy}", flush=True)
    problems = [f for f in findings if f.verdict == "problem"]
    if args.json:
        print_json({"ok": not problems, "findings": [f.to_dict() for f in findings]})
    else:
        print(f"\n{len(problems)} problems" if problems else "\nall well")
    return 1 if problems else 0
