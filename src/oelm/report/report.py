"""Build the full report of an analysis, and write it as HTML."""

from __future__ import annotations

from pathlib import Path

import oelm
from oelm.analysis.analyze import Analysis
from oelm.analysis.load import FINISHED
from oelm.files.atomic import write_text
from oelm.report.document import Block, Code, Document, Fold, Section, Text
from oelm.report.figures.charts import all_charts
from oelm.report.formats.html import to_html
from oelm.report.sections.plan import SECTIONS
from oelm.report.sections.run_list import run_list
from oelm.report.summary import headline
from oelm.report.translate import Translator


def build(analysis: Analysis, folder: Path, *, lang: str = "en", command: str = "oelm report") -> Document:
    """Return the full report.

    folder: folder of the report file; the links to run folders are relative to it
    command: the command that generates the report, to be shown in it
    """
    _ = Translator(lang)
    charts = all_charts(analysis, _)
    sections = []
    for plan in SECTIONS:
        blocks: list[Block] = plan.blocks(analysis, _)
        if plan.anchor == "verdict" and charts["verdict"]:
            blocks = [Fold(_("The same in words"), tuple(blocks))]
        blocks = [*charts.get(plan.anchor, ()), *blocks]
        if blocks:
            sections.append(Section(_(plan.title), plan.anchor, tuple(blocks)))
    sections.append(Section(_("Runs"), "runs", tuple(run_list(analysis, _, folder))))
    return Document(
        _("Frozen query/key attention: what it costs"),
        headline(analysis, _),
        about(analysis, command, _),
        tuple(sections),
        lang,
    )


def about(analysis: Analysis, command: str, _: Translator) -> tuple[Text, ...]:
    """Return the lines below the headline: runs folder, how many runs, the command that makes the report."""
    counts = {
        "runs": len(analysis.loaded.runs),
        "finished": analysis.states[FINISHED],
        "comparisons": len(analysis.comparisons.made),
    }
    return (
        _(
            "From the run folders in {root}, by oelm {version}",
            root=_shown_root(analysis.loaded.root),
            version=oelm.__version__,
        ),
        _("{runs} runs, {finished} finished; 1 comparison", **counts)
        if counts["comparisons"] == 1
        else _("{runs} runs, {finished} finished; {comparisons} comparisons", **counts),
        (_("Generated with") + " ", Code(command)),
    )


def write_html(analysis: Analysis, path: Path, *, lang: str = "en", command: str = "oelm report") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_html(build(analysis, path.parent, lang=lang, command=command)))
    return path


def _shown_root(root: Path) -> str:
    """Return the path of the runs folder; it is relative if the runs folder is inside the working folder."""
    try:
        return str(root.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(root)
