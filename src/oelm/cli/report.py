"""`oelm report`: the self-contained HTML report, its Markdown twin, and the page of claims."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from oelm.cli.analyze import add_benchmarks, load_analysis, print_warnings
from oelm.cli.options import add_catalogue, add_phase, add_runs, command_parser
from oelm.cli.output import output_file, print


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "report",
        "a self-contained HTML (or Markdown) report",
        "oelm report -o report.html --lang zh",
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="only these studies (default: every one)")
    parser.add_argument("-o", "--output", default="", metavar="FILE", help="HTML file (default: report.html)")
    parser.add_argument(
        "--markdown", default="", metavar="FILE", help="write Markdown, figures in a folder beside it"
    )
    parser.add_argument(
        "--claims", default="", metavar="FILE", help="write the page of the study's claims, checked"
    )
    parser.add_argument(
        "--lang", default="en", metavar="en|zh", help="language of the report: en (default) or zh"
    )
    add_phase(parser, "only these phases of the original study")
    add_runs(parser)
    add_benchmarks(parser)
    add_catalogue(parser)


def run(args: argparse.Namespace) -> int:
    from oelm.report.translate import Translator

    Translator(args.lang)  # reports an unknown language before minutes of work
    html = output_file(args.output or "report.html")
    markdown = output_file(args.markdown) if args.markdown else None
    if args.claims:
        _write_claims(args)
        if not (args.output or args.markdown):
            return 0
    from oelm.report.report import write_html, write_markdown

    analysis = load_analysis(args, args.studies)
    command = command_line(args)
    made = []
    if args.output or not args.markdown:
        made.append(write_html(analysis, html, lang=args.lang, command=command))
    if markdown:
        made.append(write_markdown(analysis, markdown, lang=args.lang, command=command))
    print_warnings(analysis)
    for path in made:
        print(path)
    return 0


def _write_claims(args: argparse.Namespace) -> None:
    """Without a runs folder the page still says what arithmetic says."""
    from oelm.files.atomic import write_text
    from oelm.report.claims import claims_page

    analysis = load_analysis(args, args.studies) if Path(args.runs).is_dir() else None
    write_text(output_file(args.claims), claims_page(analysis, command_line(args)))
    print(args.claims)


def command_line(args: argparse.Namespace) -> str:
    """The command that makes this again."""
    phases = ["--phase", *args.phase] if args.phase else []
    words = ["oelm", "report", *args.studies, *phases, "--runs", args.runs]
    for flag, value in (("-o", args.output), ("--markdown", args.markdown), ("--claims", args.claims)):
        words += [flag, value] if value else []
    return shlex.join([*words, *(["--lang", args.lang] if args.lang != "en" else [])])
