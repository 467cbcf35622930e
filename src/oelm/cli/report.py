"""`oelm report`: write the results as HTML, Markdown, LaTeX or CSV, and check the original study's claims."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from oelm.cli.analyze import BENCHMARKS, ResultsOptions, print_warnings
from oelm.cli.options import OUTPUT
from oelm.cli.output import output_file, print
from oelm.errors import UsageError
from oelm.report.translate import LANGUAGES
from oelm.runs.scan import require_runs_folder

Language = Annotated[str, Parameter(name="--lang", choices=LANGUAGES, help="Language of the report.")]


def report(
    *studies: str,
    output: Annotated[str, OUTPUT] = "",
    markdown: str = "",
    latex: str = "",
    csv: str = "",
    claims: str = "",
    summary: str = "",
    lang: Language = "en",
    options: ResultsOptions = ResultsOptions(),
) -> None:
    """Analyze the finished runs and write the files that the options name.

    Parameters
    ----------
    studies
        Only these studies (default: all).
    output
        HTML file (default: report.html).
    markdown
        Markdown file with a short report; its figures are written to a folder beside it. With --phase, the
        report of that phase without figures: settings, verdicts, comparisons, the results that the original
        study reported, and all runs.
    latex
        Folder for the tables as LaTeX files, and the figures as PDF and PNG in the width of a text column.
    csv
        CSV file with one row per comparison.
    claims
        Markdown file with the claims of the original study, each checked against the results.
    summary
        Markdown file with the results and verdicts of all phases on one page, beside the results that the
        original study reported.
    """
    html = output_file(output or "report.html")
    page = output_file(markdown) if markdown else None
    table = output_file(csv) if csv else None
    overview = output_file(summary) if summary else None
    files = {"-o": output, "--markdown": markdown, "--latex": latex, "--csv": csv, "--claims": claims}
    files["--summary"] = summary
    _check_different_files(files)
    command = command_line(studies, options, files, lang)
    if claims:
        _write_claims(output_file(claims), studies, options, command)
        if not (output or markdown or latex or csv or summary):
            return
    from oelm.report.digest import write_markdown
    from oelm.report.formats.export import write_csv, write_latex
    from oelm.report.phases import write_phase, write_summary
    from oelm.report.report import write_html

    analysis = options.load(studies)
    made = []
    if output or not (markdown or latex or csv or summary):
        made.append(write_html(analysis, html, lang=lang, command=command))
    if page and options.phase:
        made.append(write_phase(analysis, options.phase, page, lang=lang, command=command))
    elif page:
        made.append(write_markdown(analysis, page, lang=lang, command=command))
    if overview:
        made.append(write_summary(analysis, overview, lang=lang, command=command))
    if latex:
        made += write_latex(analysis, Path(latex), lang=lang)
    if table:
        made.append(write_csv(analysis, table))
    print_warnings(analysis)
    for path in made:
        print(path)


def _check_different_files(files: Mapping[str, str]) -> None:
    """Raise UsageError if two options name one file, because the second one would replace the first."""
    flags: dict[str, str] = {}
    for flag, path in files.items():
        if path and not path.startswith("/dev/"):
            other = flags.setdefault(os.path.realpath(path), flag)
            if other != flag:
                raise UsageError(f"{other} and {flag} name the same file, {path}; give each its own")


def _write_claims(path: Path, studies: Sequence[str], options: ResultsOptions, command: str) -> None:
    """Write the page that checks the claims of the original study.

    Without a runs folder, the page contains only the claims that can be checked without runs.
    """
    from oelm.files.atomic import write_text
    from oelm.report.sections.claims import claims_page

    if options.runs != "runs":
        require_runs_folder(options.runs)
    analysis = options.load(studies) if Path(options.runs).is_dir() else None
    write_text(path, claims_page(analysis, command))
    print(path)


def command_line(
    studies: Sequence[str], options: ResultsOptions, files: dict[str, str], lang: str = "en"
) -> str:
    """Return the command line that writes the same report again."""
    words = ["oelm", "report", *studies, *(["--phase", *options.phase] if options.phase else [])]
    words += ["--runs", options.runs]
    words += ["--benchmarks", options.benchmarks] if options.benchmarks != BENCHMARKS else []
    for file in options.catalogue:
        words += ["--catalogue", str(file)]
    for flag, value in files.items():
        words += [flag, value] if value else []
    return shlex.join([*words, *(["--lang", lang] if lang != "en" else [])])
