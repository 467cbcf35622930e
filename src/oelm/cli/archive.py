"""`oelm archive pack | verify | merge | keep`: results in one verified file, or as a folder to commit."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oelm.cli.options import add_json, add_runs, command_parser
from oelm.cli.output import print, print_json
from oelm.runs.archive import merge, pack, verify
from oelm.runs.keep import keep
from oelm.units import bytes_text


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "archive",
        "pack a study's results into one verified file, merge one into the runs folder, or keep them small",
        "oelm archive pack results.tar.gz --study paper\n"
        "  oelm archive merge results.tar.gz --runs runs\n"
        "  oelm archive keep results --study gap",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="pack|verify|merge|keep")
    packing = actions.add_parser("pack", help="configs, manifests, metrics, logs and results in one file")
    packing.add_argument("file", metavar="FILE.tar.gz")
    packing.add_argument("--study", default="", help="only this study's runs")
    packing.add_argument("--weights", action="store_true", help="the best models too")
    checking = actions.add_parser("verify", help="check every byte of an archive")
    checking.add_argument("file", metavar="FILE.tar.gz")
    merging = actions.add_parser("merge", help="add an archive's runs; nothing is ever overwritten")
    merging.add_argument("file", metavar="FILE.tar.gz")
    keeping = actions.add_parser("keep", help="copy what figures are made of to a folder, no weights")
    keeping.add_argument("folder", metavar="DIR")
    keeping.add_argument("--study", default="", help="only this study's runs")
    for action in (packing, merging, keeping):
        add_runs(action)
    for action in (packing, checking, merging, keeping):
        add_json(action)


def run(args: argparse.Namespace) -> int:
    return {"pack": _pack, "verify": _verify, "merge": _merge, "keep": _keep}[args.action](args)


def _pack(args: argparse.Namespace) -> int:
    made = pack(args.runs, args.file, study=args.study, weights=args.weights)
    if args.json:
        print_json({"file": str(made.path), "runs": made.runs, "files": made.files, "bytes": made.bytes})
    else:
        print(f"{made.path}: {made.runs} runs, {made.files} files, {bytes_text(made.bytes)}, verified")
    return 0


def _verify(args: argparse.Namespace) -> int:
    index = verify(args.file)
    if args.json:
        print_json({"runs": len(index.runs), **asdict(index)})
    else:
        print(f"{args.file}: {len(index.runs)} runs, {len(index.files)} files, every hash holds")
    return 0


def _merge(args: argparse.Namespace) -> int:
    done = merge(args.file, args.runs)
    if args.json:
        print_json(asdict(done))
    else:
        for name in done.conflicts:
            print(f"conflict, left as it is: {Path(args.runs) / name}")
        added, same = len(done.added), len(done.same)
        print(f"{added} files added, {same} already there, {len(done.conflicts)} conflicts")
        if done.withheld:
            print(
                f"{len(done.withheld)} new files of runs with conflicts were not added; "
                "to take the archive's version of such a run, move its folder away and merge again"
            )
    return 1 if done.conflicts else 0


def _keep(args: argparse.Namespace) -> int:
    kept = keep(args.runs, args.folder, study=args.study)
    if args.json:
        print_json({"folder": args.folder, **asdict(kept)})
    else:
        print(f"{args.folder}: {kept.runs} runs, {kept.files} files, {bytes_text(kept.bytes)}")
    return 0
