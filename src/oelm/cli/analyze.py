"""`oelm analyze`: tables, gaps with intervals, verdicts, in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oelm.cli.options import add_catalogue, add_json, add_phase, add_runs, command_parser, load_own
from oelm.cli.output import print, print_json, print_table, print_text
from oelm.errors import OelmError, UsageError
from oelm.experiments.catalogue import planned_configs, reported_with

if TYPE_CHECKING:
    from oelm.analysis.analyze import Analysis
    from oelm.report.document import Block

BENCHMARKS = "benchmarks/results"


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers, "analyze", "tables, gaps with confidence intervals, verdicts", "oelm analyze --all gap"
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="only these studies (default: every one)")
    parser.add_argument(
        "--all", action="store_true", help="also costs, closing tables, totals and what is pending"
    )
    add_phase(parser, "only these phases of the original study")
    add_runs(parser)
    add_benchmarks(parser)
    add_catalogue(parser)
    add_json(parser)


def add_benchmarks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--benchmarks",
        default=BENCHMARKS,
        metavar="DIR",
        help="interleaved step times (of `oelm bench step`)",
    )


def run(args: argparse.Namespace) -> int:
    analysis = load_analysis(args, args.studies)
    if args.json:
        print_json(analysis.to_dict())
        return 0
    from oelm.report.sections import SECTIONS, Shown
    from oelm.report.summary import headline
    from oelm.report.translate import Translator

    _ = Translator("en")
    print(headline(analysis, _))
    most = Shown.ANALYZE_ALL if args.all else Shown.ANALYZE
    for section in (section for section in SECTIONS if section.shown <= most):
        blocks = section.blocks(analysis, _)
        if blocks:
            title = _(section.title)
            print(f"\n{title}\n{'=' * len(title)}\n")
            print_blocks(blocks)
    print_warnings(analysis)
    return 0


def load_analysis(args: argparse.Namespace, studies: Iterable[str] = ()) -> Analysis:
    from oelm.analysis.analyze import analyze

    load_own(args)
    if args.benchmarks != BENCHMARKS and not Path(args.benchmarks).is_dir():
        raise UsageError(f"--benchmarks: there is no folder {args.benchmarks}")
    if args.phase and studies:
        raise UsageError("name studies or --phase, not both: phases belong to the study paper")
    ids = reported_with(args.phase) if args.phase else None
    analysis = analyze(
        Path(args.runs),
        ["paper"] if args.phase else studies,
        Path(args.benchmarks),
        planned=planned_configs(),
        ids=ids,
    )
    if not (analysis.loaded.runs or analysis.loaded.trials or analysis.warnings):
        of_phase = f" of phase {', '.join(map(str, args.phase))}" if args.phase else ""
        raise OelmError(
            f"no runs{of_phase} in {args.runs} yet; `oelm demo` or `oelm train` make some "
            "(--runs names another folder)"
        )
    return analysis


def print_warnings(analysis: Analysis) -> None:
    if analysis.loaded.unverified:
        print(
            f"\n{analysis.loaded.unverified} results have no checksums (an earlier version wrote them): "
            "damage to their files would not be noticed"
        )
    if analysis.warnings:
        print(f"\n{len(analysis.warnings)} folders need attention:")
        for warning in analysis.warnings:
            print(f"  {warning}")


def print_blocks(blocks: Iterable[Block]) -> None:
    """A document's blocks as plain text; figures have no place here."""
    from oelm.report.document import Bullets, Cards, Fold, Paragraph, Table, plain

    for block in blocks:
        if isinstance(block, Paragraph):
            print_text(plain(block.text))
            print()
        elif isinstance(block, Cards):
            for card in block.cards:
                print(f"{card.title}: {card.badge}")
                for line in card.lines:
                    print_text(plain(line).removesuffix(" runs"), indent="  ", hang="  ")
                print()
        elif isinstance(block, Table):
            if block.caption:
                print(block.caption)
            print_table(block.head, [[plain(cell) for cell in row.cells] for row in block.rows], indent="  ")
            print()
        elif isinstance(block, Bullets):
            for item in block.items:
                print_text(plain(item), indent="  - ")
            print()
        elif isinstance(block, Fold):
            print(block.title)
            print_blocks(block.blocks)
