"""Write the comparisons to a CSV file, and the tables and figures of the report to files for a paper."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path
from typing import Any

from oelm.analysis.analyze import Analysis
from oelm.analysis.compare import Comparison
from oelm.files.atomic import write_text
from oelm.printable import printable
from oelm.report import numbers
from oelm.report.document import Table, plain
from oelm.report.sections.plan import SECTIONS
from oelm.report.sentences import shown_verdict
from oelm.report.translate import Translator

MAX_ROWS = 40  # maximum number of rows of a LaTeX table, so that it fits on a page
_LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "–": "--",
    "·": r"$\cdot$",
}


CSV_COLUMNS = (
    *("study", "scale", "group", "dataset", "kind", "arm", "id", "reference", "reference_id", "metric"),
    *("unit", "change", "low", "high", "tuning_sd", "n", "n_reference", "verdict"),
)


def write_csv(analysis: Analysis, path: Path) -> Path:
    """Write a CSV file with one row per comparison: the change (in % or points), its interval, n, verdict."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS)
    writer.writeheader()
    writer.writerows(_csv_row(c) for c in analysis.comparisons.made)
    write_text(path, out.getvalue())
    return path


def _csv_row(c: Comparison) -> dict[str, str | int | float]:
    perplexity = c.metric == "ppl"

    def number(value: float) -> float:
        return round(numbers.percent(value) if perplexity else value, 4)

    bounds = c.effect.interval if c.effect else None
    return {
        "study": _no_formula(c.arm.config.study),
        "scale": c.arm.config.scale,
        "group": _no_formula(c.group),
        "dataset": _no_formula(c.dataset),
        "kind": c.kind,
        "arm": _no_formula(c.arm.name),
        "id": _no_formula(c.arm.id),
        "reference": _no_formula(c.reference.name),
        "reference_id": _no_formula(c.reference.id),
        "metric": c.metric,
        "unit": "%" if perplexity else "points",
        "change": number(c.effect.value) if c.effect else "",
        "low": number(bounds[0]) if bounds else "",
        "high": number(bounds[1]) if bounds else "",
        "tuning_sd": "" if c.lr_choice_sd is None else round((100 if perplexity else 1) * c.lr_choice_sd, 4),
        "n": c.effect.n if c.effect else "",
        "n_reference": c.effect.n_reference if c.effect else "",
        "verdict": shown_verdict(c).outcome,
    }


def _no_formula(text: str) -> str:
    """Return the text in a form that no spreadsheet program evaluates as a formula."""
    text = printable(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def write_latex(analysis: Analysis, folder: Path, *, lang: str = "en") -> list[Path]:
    """Write each table of the report to a file for LaTeX's \\input, and the figures as PDF and PNG.

    The paper needs the packages booktabs and adjustbox. The words in the figures are English in every
    language, because the fonts that come with matplotlib have no Chinese characters.
    """
    from oelm.report.figures.drawing import PAPER, plot_style
    from oelm.report.figures.plots import all_drawings

    _ = Translator(lang)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in SECTIONS:
        tables = [block for block in section.blocks(analysis, _) if isinstance(block, Table)]
        for i, table in enumerate(tables, 1):
            name = f"{section.anchor}-{i}"
            written.append(folder / f"{name}.tex")
            write_text(written[-1], to_latex(table, table.caption or _(section.title), name))
    with plot_style(PAPER):
        for drawing in all_drawings(analysis, Translator("en")):
            written += drawing.save(folder)
    return written


def to_latex(table: Table, caption: str, label: str) -> str:
    """Return a table as a LaTeX table over the width of the page, made smaller if it is wider.

    A table of more than MAX_ROWS rows becomes several, because LaTeX does not break a table over pages.

    >>> from oelm.report.document import Row
    >>> print(to_latex(Table(("Arm", "Change"), (Row(("a_b", "−1.5 %")),)), "Cost of each arm", "costs-1"))
    \\begin{table*}
    \\caption{Cost of each arm}\\label{tab:costs-1}
    \\begin{adjustbox}{max width=\\textwidth, center}
    \\begin{tabular}{lr}
    \\toprule
    Arm & Change \\\\
    \\midrule
    a\\_b & $-$1.5 \\% \\\\
    \\bottomrule
    \\end{tabular}
    \\end{adjustbox}
    \\end{table*}
    <BLANKLINE>
    """
    columns = "".join("l" if i < table.words or i == table.verdict else "r" for i in range(len(table.head)))
    total = max(1, math.ceil(len(table.rows) / MAX_ROWS))
    lines: list[str] = []
    for part in range(total):
        which, suffix = (f" ({part + 1}/{total})", f"-{part + 1}") if total > 1 else ("", "")
        lines += [
            r"\begin{table*}",
            rf"\caption{{{_escape_latex(caption + which)}}}\label{{tab:{label}{suffix}}}",
            r"\begin{adjustbox}{max width=\textwidth, center}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            _latex_row(table.head),
            r"\midrule",
            *(
                _latex_row(plain(cell) for cell in row.cells)
                for row in table.rows[part * MAX_ROWS : (part + 1) * MAX_ROWS]
            ),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{adjustbox}",
            r"\end{table*}",
        ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Any) -> str:
    return " & ".join(_escape_latex(cell) for cell in cells) + r" \\"


def _escape_latex(text: str) -> str:
    return re.sub(r"[&%$#_{}\\~^−–·]", lambda match: _LATEX[match[0]], printable(text))
