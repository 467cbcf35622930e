"""`oelm clean`: show what finished runs' checkpoints take, free it on confirmation."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from oelm.cli.options import add_json, add_runs, command_parser, require_study
from oelm.cli.output import print, print_json, print_table
from oelm.runs.disk import free, freeable
from oelm.units import bytes_text


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "clean",
        "free the disk of finished runs' resume checkpoints; best models and results always stay",
        "oelm clean --study paper",
    )
    add_runs(parser)
    parser.add_argument("--study", default="", help="only this study's runs")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    found = freeable(args.runs)
    require_study(args.study, (item.run for item in found))
    items = [item for item in found if not args.study or item.run.study == args.study]
    total = sum(item.bytes for item in items)
    if args.json:
        freed = free(items) if args.yes else 0
        rows = [
            {"folder": str(i.run.path), "bytes": i.bytes, "files": [f.name for f in i.files]} for i in items
        ]
        print_json({"freeable_bytes": total, "freed_bytes": freed, "runs": rows})
        return 0
    if not items:
        there = Path(args.runs).is_dir()
        print(
            "nothing to free: no finished run keeps resume checkpoints"
            if there
            else f"nothing to free: there is no folder {args.runs} (--runs)"
        )
        return 0
    print_table(("finished run", "takes"), [(str(i.run.path), bytes_text(i.bytes)) for i in items])
    print(f"\n{bytes_text(total)} in {len(items)} finished runs; best models and results stay")
    if not args.yes and not _confirmed():
        print("nothing was removed")
        return 0
    print(f"freed {bytes_text(free(items))}")
    return 0


def _confirmed() -> bool:
    """Only a person at a terminal confirms: a `yes |` of a script is not meant for this question."""
    if not sys.stdin.isatty():
        print("there is no terminal to ask on: --yes frees it")
        return False
    return input("free it? [y/N] ").strip().lower() in ("y", "yes")
