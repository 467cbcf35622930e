"""`oelm doctor`: preflight before hours are spent."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.cli.options import (
    add_changes,
    add_json,
    add_machine,
    add_runs,
    add_scale,
    add_seeds,
    add_selection,
    chosen_experiments,
    command_parser,
    machine_from,
)
from oelm.cli.output import print, print_json
from oelm.config.overrides import changes_from_words
from oelm.config.run_config import RunConfig
from oelm.experiments.study import Request

if TYPE_CHECKING:
    from oelm.experiments.resume.check import Case, Reference

_DEFAULT_RESUME_CHECK = ("GPT-02", "smoke")  # needs no data


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "doctor",
        "preflight: versions, devices, precision, disk, and for each experiment named its data, labels, "
        "tokenizer, one training step and one evaluation",
        "oelm doctor GPT-01 GPT-02 --scale mini\n  oelm doctor --all --seeds 0 1 2\n"
        "  oelm doctor GPT-02 --scale mini --resume --runs /scratch/runs",
    )
    add_selection(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="prove on this machine and on the file system of --runs that a run which is killed or told to "
        "stop continues and ends with the same bytes as one that was not (default: GPT-02 at scale smoke)",
    )
    parser.add_argument(
        "--preempt",
        action="store_true",
        help="the same for the signals of schedulers only: SIGTERM and the others that ask a run to stop",
    )
    add_seeds(parser)
    add_scale(parser)
    add_changes(parser)
    add_runs(parser)
    add_machine(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from oelm.experiments.doctor import examine

    named = args.ids or args.study or args.everything or args.phase
    if (args.resume or args.preempt) and not named:
        args.ids, args.scale, named = list(_DEFAULT_RESUME_CHECK[:1]), _DEFAULT_RESUME_CHECK[1], True
    chosen = chosen_experiments(args) if named else []
    request = Request(
        chosen,
        (args.scale,),
        args.seeds,
        changes_from_words(args.changes),
        args.study_name,
        data_dir=args.data_dir,
    )
    arms = request.arms()
    if args.resume or args.preempt:
        return _check_resume(args, [arm.runs[0] for arm in arms])
    planned = [(arm.runs[0], arm.total_runs) for arm in arms]
    findings = []
    for finding in examine(planned, args.runs, machine_from(args)):
        findings.append(finding)
        if not args.json:
            print(f"{'ok' if finding.ok else 'problem':8} {finding.subject}: {finding.text}", flush=True)
            for note in finding.notes:
                print(f"{'':8} note: {note}", flush=True)
            if finding.remedy:
                print(f"{'':8} what to do: {finding.remedy}", flush=True)
    problems = [f for f in findings if not f.ok]
    if args.json:
        print_json({"ok": not problems, "findings": [f.to_dict() for f in findings]})
    else:
        print(f"\n{len(problems)} problems" if problems else "\nall well")
    return 1 if problems else 0


def _check_resume(args: argparse.Namespace, configs: list[RunConfig]) -> int:
    """Interrupt a short run of each experiment at several moments; 0 when all of them end as they should."""
    from oelm.experiments.resume.check import KILLS, PREEMPTIONS, resume_check

    wanted = (KILLS if args.resume else ()) + (PREEMPTIONS if args.preempt else ())
    reports = []
    for config in configs:
        with resume_check(config, args.runs, machine_from(args)) as check:
            reference = check.reference()
            if not args.json:
                _print_reference(config, check.place, reference)
            cases = []
            for interruption in dict.fromkeys(wanted):
                cases.append(check.case(interruption))
                if not args.json:
                    _print_case(cases[-1])
        proven = all(case.ok for case in cases)
        report = {
            "id": config.id,
            "scale": config.scale,
            "ok": proven,
            "file_system": str(check.place.parent),
        }
        reports.append(
            report | {"reference": reference.to_dict(), "cases": [case.to_dict() for case in cases]}
        )
        if not args.json:
            print(_conclusion(reference, cases))
    ok = all(report["ok"] for report in reports)
    if args.json:
        print_json({"ok": ok, "checks": reports})
    return 0 if ok else 1


def _print_reference(config: RunConfig, place: Path, reference: Reference) -> None:
    from oelm.experiments.resume.check import SPREAD_FACTOR, STEPS

    print(
        f"{config.id} ({config.scale}) on {reference.device} in {reference.precision}, files in "
        f"{place.parent}: a run of {STEPS} steps takes {reference.seconds:.0f} s"
    )
    if reference.deterministic:
        print("two uninterrupted runs: equal byte by byte, so this device is deterministic")
    else:
        print("uninterrupted runs differ: this device is not deterministic")
        for difference in reference.spread:
            print(f"  {difference}")
        print(f"an interrupted run passes if it differs by no more than {SPREAD_FACTOR:g} times as much")
    print(f"\n{'interrupted by':24}{'ended after':>12}{'continued from':>18}   result", flush=True)


def _print_case(case: Case) -> None:
    seconds = "-" if case.stop_seconds is None else f"{case.stop_seconds:.1f} s"
    origin = {None: "-", 0: "the beginning"}.get(case.resumed_after, f"step {case.resumed_after}")
    result = case.result if case.result != "failed" else f"failed: {case.problem}"
    print(f"{case.interruption!s:24}{seconds:>12}{origin:>18}   {result}", flush=True)
    for difference in case.differences:
        print(f"{'':57}{difference}", flush=True)


def _conclusion(reference: Reference, cases: Sequence[Case]) -> str:
    from oelm.experiments.resume.check import SPREAD_FACTOR

    bad = sum(not case.ok for case in cases)
    if bad:
        return (
            f"\nnot proven: {bad} of {len(cases)} interruptions change the run. Please report this table.\n"
        )
    if reference.deterministic:
        return (
            f"\nproven: after each of {len(cases)} interruptions metrics, results, best model and last "
            "checkpoint are equal byte by byte to those of an uninterrupted run\n"
        )
    return (
        f"\nproven as far as this device allows: after each of {len(cases)} interruptions a run differs from "
        f"an uninterrupted one by no more than {SPREAD_FACTOR:g} times what uninterrupted ones differ by\n"
    )
