"""Build the report of one phase of the original study, and the summary of all phases, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oelm.analysis.analyze import Analysis
from oelm.analysis.arms import Arm
from oelm.experiments.catalogue import PHASES, experiments
from oelm.files.atomic import write_text
from oelm.report import numbers, summary
from oelm.report.document import Block, Document, Paragraph, Row, Section, Table
from oelm.report.formats.markdown import to_markdown
from oelm.report.report import about
from oelm.report.sections import comparisons, overview, run_list
from oelm.report.sentences import SCALES
from oelm.report.translate import Translator


def write_phase(analysis: Analysis, phases: Sequence[str], path: Path, *, lang: str, command: str) -> Path:
    """Write one report on these phases of the original study.

    It has the settings, verdicts, comparisons, the numbers that the original study reports, and all runs.
    """
    _ = Translator(lang)
    parts = (
        (_("Settings"), "settings", _settings(analysis.arms, _)),
        (_("Verdicts"), "verdict", summary.cards(analysis, _)),
        (_("Every arm against its baseline"), "comparisons", comparisons.baseline_tables(analysis, _)),
        (_("What freezing alone costs"), "control", comparisons.control_table(analysis, _)),
        (_("Orthogonality or scale?"), "orthogonality", comparisons.orthogonality_table(analysis, _)),
        (_("Reported and reproduced"), "reported", overview.reported_tables(analysis, _)),
        (_("Limitations"), "limitations", run_list.limitations(analysis, _)),
        (_("Finished and pending"), "totals", run_list.totals(analysis, _)),
        (_("Runs"), "runs", run_list.run_list(analysis, _, path.parent)),
    )
    title = _("Report of phase {phases}", phases=tuple(phases))
    sections = tuple(Section(name, anchor, tuple(blocks)) for name, anchor, blocks in parts if blocks)
    document = Document(title, summary.headline(analysis, _), about(analysis, command, _), sections, lang)
    write_text(path, to_markdown(document))
    return path


def write_summary(analysis: Analysis, path: Path, *, lang: str, command: str) -> Path:
    """Write one page with our results, the original study's, and the verdicts, for every phase with runs."""
    _ = Translator(lang)
    sections = []
    for phase, about_phase in PHASES.items():
        arms = [arm for arm in analysis.arms if _phase(arm) == phase]
        if arms:
            title = _("Phase {phase}: {about}", phase=phase, about=about_phase)
            sections.append(Section(title, f"phase-{phase}", tuple(_results(analysis, arms, _))))
    totals = Section(_("Finished and pending"), "totals", tuple(run_list.totals(analysis, _)))
    document = Document(
        _("Results of all phases"),
        summary.headline(analysis, _),
        about(analysis, command, _),
        (*sections, totals),
        lang,
    )
    write_text(path, to_markdown(document))
    return path


def _phase(arm: Arm) -> int | str:
    known = experiments().get(arm.id)
    return known.phase if known and arm.config.study == known.study else ""


def _results(analysis: Analysis, arms: Sequence[Arm], _: Translator) -> list[Block]:
    rows = []
    for arm in arms:
        reported = experiments()[arm.id].reported
        score = numbers.score(arm.mean, arm.metric) if arm.finished else "–"
        seeds = ", ".join(str(run.seed) for run in arm.finished) or "–"
        scale = _(SCALES[arm.config.scale])
        rows.append(Row((arm.id, arm.name, scale, seeds, score, str(reported) if reported else "–")))
    head = (_("ID"), _("Arm"), _("Scale"), _("Seeds"), _("Ours"), _("Reported by the original study"))
    keys = {arm.key for arm in arms}
    made = [c for c in analysis.comparisons.made if c.arm.key in keys and c.effect is not None]
    blocks: list[Block] = [Table(head, tuple(rows), words=4)]
    if not made:
        return [*blocks, Paragraph(_("No comparison has finished runs on both sides yet."))]
    return [*blocks, comparisons.without_links(comparisons.pair_table(made, _))]


def _settings(arms: Sequence[Arm], _: Translator) -> list[Block]:
    """Return the table of each arm's settings: data, model, method, learning rate, budget and batch size."""
    rows = []
    for arm in arms:
        c = arm.config
        model = c.model.name or c.model.family
        epochs, steps = c.budget.epochs, c.budget.steps
        length = _("{n} epochs", n=epochs) if epochs else _("{n} steps", n=f"{steps:,}")
        length = _("1 epoch") if epochs == 1 else length
        batch = f"{c.budget.batch_size} x {c.budget.accumulation}"
        lr = _("{lr} (tuned)", lr=f"{c.optim.lr:g}") if c.tune.grid else f"{c.optim.lr:g}"
        cells = (arm.id, _(SCALES[c.scale]), c.data.dataset, model, c.method.name)
        rows.append(Row((*cells, lr, length, batch, str(c.data.max_length))))
    head = (_("ID"), _("Scale"), _("Data"), _("Model"), _("Method"), _("Learning rate"), _("Budget"))
    return [Table((*head, _("Batch"), _("Length")), tuple(rows), words=5)] if rows else []
