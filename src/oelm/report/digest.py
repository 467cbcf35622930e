"""Build the short report: a Markdown page with a figure and a table for each of four subjects."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from oelm.analysis.analyze import Analysis
from oelm.analysis.compare import Comparison
from oelm.analysis.costs import StepRatio
from oelm.files.atomic import write_text
from oelm.report import numbers
from oelm.report.document import Block, Code, Document, Figure, Paragraph, Row, Section, Table
from oelm.report.figures import plots
from oelm.report.figures.drawing import ArmStyles, Drawing, plot_style
from oelm.report.formats.markdown import to_markdown
from oelm.report.report import about
from oelm.report.sections.comparisons import mean_table, pair_table, without_links
from oelm.report.sections.run_list import limitations
from oelm.report.summary import count_verdicts, frozen_against, headline
from oelm.report.translate import Translator


def build_digest(analysis: Analysis, *, lang: str = "en", command: str = "oelm report") -> Document:
    """Return the short report.

    Its main sections are language modelling with frozen Q/K alone, language modelling with trainable extras,
    classification, and the cost in step time and memory.

    command: the command that generates the report, to be shown in it
    """
    _ = Translator(lang)
    frozen = [c for c in frozen_against("baseline", analysis) if c.effect is not None]
    classifiers = [c for c in frozen if c.metric == "accuracy"]
    language = [c for c in frozen if c.metric == "ppl"]
    alone = [c for c in language if not c.arm.method.has_extras]
    extras = [c for c in language if c.arm.method.has_extras]
    controls = [
        c for c in frozen_against("control", analysis) if c.metric == "ppl" and c.arm.method.has_extras
    ]
    styles = ArmStyles([arm.name for arm in analysis.arms])
    with plot_style():
        sections = (
            Section(_("Average over datasets"), "mean", tuple(mean_table(analysis, _))),
            Section(
                _("Language modelling: what freezing costs"),
                "language-modelling",
                _question(alone, (), styles, _, name="language-modelling"),
            ),
            Section(
                _("Language modelling: freezing with trainable extras"),
                "extras",
                _question(extras, controls, styles, _, name="extras"),
            ),
            Section(
                _("Classification: pretrained encoders, and GPT from scratch"),
                "classification",
                _question(classifiers, (), styles, _, name="classification"),
            ),
            Section(_("Step time and memory"), "step-time", _step_times(analysis.benchmarks, styles, _)),
            Section(_("Limitations"), "limitations", tuple(limitations(analysis, _))),
        )
    full = shlex.join(["oelm", "report", "--runs", str(analysis.loaded.root), "-o", "report.html"])
    more = (_("All comparisons, training curves and runs:") + " ", Code(full))
    verdict_words = _(
        "“Within 5 %” means at most 1.05 times the perplexity, or at least 0.95 times the accuracy, of the "
        "reference. Changes of accuracy are shown in points."
    )
    return Document(
        _("Frozen query/key attention: what it costs"),
        headline(analysis, _),
        (*about(analysis, command, _), more, verdict_words),
        tuple(section for section in sections if section.blocks),
        lang,
    )


def write_markdown(analysis: Analysis, path: Path, *, lang: str = "en", command: str = "oelm report") -> Path:
    """Write the short report to `path`, and its figures to the folder `<name>_figures/` beside it."""
    document = build_digest(analysis, lang=lang, command=command)
    folder = path.parent / f"{path.stem}_figures"
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{figure.name}.svg": figure.svg for figure in document.figures}
    for file, svg in files.items():
        write_text(file, svg)
    for stale in {*folder.glob("*.svg")} - files.keys():  # figures of an earlier report
        stale.unlink()
    write_text(path, to_markdown(document, folder.name))
    return path


def _question(
    comparisons: Sequence[Comparison],
    controls: Sequence[Comparison],
    styles: ArmStyles,
    _: Translator,
    *,
    name: str,
) -> tuple[Block, ...]:
    """Return the content of a section: the verdicts in words, a figure, and a table with intervals.

    Returns () if there are no comparisons.
    """
    if not comparisons:
        return ()
    return (
        Paragraph(count_verdicts(comparisons, _)),
        _figure(plots.changes(comparisons, styles, _, name=name)),
        without_links(pair_table([*comparisons, *controls], _)),
    )


def _figure(drawing: Drawing) -> Figure:
    return Figure(drawing.name, drawing.svg(), drawing.caption)


def _step_times(benchmarks: Sequence[StepRatio], styles: ArmStyles, _: Translator) -> tuple[Block, ...]:
    if not benchmarks:
        return ()
    head = (_("Method"), _("Model"), _("Verdict"), _("Step time"), _("95 % interval"), _("Processes"))
    rows = []
    for b in benchmarks:
        low, high = b.interval
        verdict = _("faster") if high < 1 else _("slower") if low > 1 else _("no significant difference")
        interval = _("{low} to {high}", low=_change(low), high=_change(high))
        memory = "–" if b.memory_ratio is None else _change(b.memory_ratio)
        bound = "–" if b.bound is None else _change(1 - b.bound)
        cells = (b.method, b.model, verdict, _change(b.ratio), interval, str(b.processes), memory, bound)
        rows.append(Row((*cells, b.source.name)))
    return (
        _figure(plots.step_times(benchmarks, styles, _)),
        Table((*head, _("Peak memory"), _("FLOP bound"), _("File")), tuple(rows), words=3),
    )


def _change(ratio: float) -> str:
    return f"{numbers.signed(100 * (ratio - 1))} %"
