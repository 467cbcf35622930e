"""Prepare the data of the HTML report's forest plots and curves, which look like those of `oelm board`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from oelm.analysis.analyze import Analysis
from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison
from oelm.analysis.load import LoadedRun
from oelm.report.board.curves import Seed, chart
from oelm.report.board.forest import CAPTIONS, forest
from oelm.report.board.metrics import Column, RunMetrics
from oelm.report.board.questions import ShownQuestion, all_questions
from oelm.report.document import Block, Chart, Charts, ForestPlot
from oelm.report.sections.answers import RULES
from oelm.report.sentences import group_title, place
from oelm.report.summary import anchor, by_group, main_comparisons
from oelm.report.translate import Translator

MAX_ARMS = 8  # maximum number of arms in one chart, so that each arm has its own colour
MEASUREMENTS = ("validation_loss", "entropy")


def all_charts(analysis: Analysis, _: Translator) -> dict[str, list[Block]]:
    """Return {anchor of a section of the report: charts of that section}."""
    groups = by_group(analysis.comparisons.made).values()
    main = {_key(c) for comparisons in groups for c in main_comparisons(comparisons)}
    questions = all_questions(analysis.comparisons, analysis.loaded.trials)
    compared = [q for q in questions if q.comparison is not None]
    return {
        "verdict": forest_plots([q for q in compared if q.kind in RULES or _key(q.comparison) in main], _),
        "comparisons": forest_plots([q for q in compared if q.kind == "baseline"], _),
        "training": list(_curves(analysis.comparisons.of("baseline"), _)),
    }


def _key(c: Comparison | None) -> tuple[object, ...]:
    return (c.kind, c.arm.key, c.reference.id) if c else ()


def forest_plots(questions: Sequence[ShownQuestion], _: Translator) -> list[Block]:
    """Return one forest plot per study and metric. Each question needs a comparison."""

    def study_and_metric(q: ShownQuestion) -> tuple[str, str]:
        return q.study, q.comparison.metric if q.comparison else ""

    made: list[Block] = []
    head = (_("Question"), _("Verdict"), _("Plot"), _("Change"), _("95 % interval"), "n")
    for (study, metric), found in groupby(sorted(questions, key=study_and_metric), key=study_and_metric):
        rows = list(found)
        plot = forest(rows, _)
        shown = ((row, place(q.arm, _), anchor(q.arm)) for row, q in zip(plot.rows, rows, strict=True))
        explained = _("Bar: 95 % confidence interval; dashed: margin; solid: no change.")
        caption = _.join([_("{name}: {text}", name=study, text=CAPTIONS[metric]), explained])
        made.append(ForestPlot(tuple(shown), plot.ticks, caption, head))
    return made


def _curves(baseline: Sequence[Comparison], _: Translator) -> Iterator[Charts]:
    """Yield the training curves of each group of experiments, in parts of at most MAX_ARMS arms."""
    for group in by_group(baseline).values():
        for arms in in_parts(group):
            found = curves(arms, MEASUREMENTS, _)
            if found:
                yield Charts(group_title(group[0], _), tuple(map(Chart, found)))


def curves(arms: Sequence[Arm], measurements: Sequence[str], _: Translator) -> list[dict[str, Any]]:
    """Return one chart per measurement, with the finished runs of the arms.

    Measurements that no run has are left out.
    """
    columns = {run.path: _columns(run) for arm in arms for run in arm.finished}
    charts = []
    for measurement in measurements:
        if any(measurement in found for found in columns.values()):
            lines = []
            for arm in arms:
                named = {run.path: _("seed {seed}", seed=run.seed) for run in arm.finished}
                seeds = {
                    str(path): Seed(name, columns[path].get(measurement, {}), False)
                    for path, name in named.items()
                }
                lines.append((arm.name, seeds))
            charts.append(chart(lines, measurement, _))
    return charts


def _columns(run: LoadedRun) -> dict[str, Column]:
    metrics = RunMetrics()
    metrics.update(run.reader, costs=False)
    return metrics.columns


def in_parts(group: Sequence[Comparison]) -> Iterator[list[Arm]]:
    """Yield the arms of a group in parts of at most MAX_ARMS arms; each part is drawn in one chart.

    Each part starts with a reference arm, followed by the arms that are compared with it. An arm and its
    control are in the same part.
    """
    references = {c.reference.id: c.reference for c in group}
    for reference in references.values():
        left = {c.arm.id: c.arm for c in group if c.reference.id == reference.id}
        part = [reference]
        while left:
            arm = left.pop(next(iter(left)))
            paired = [a.id for a in left.values() if arm.id == _control(a) or a.id == _control(arm)]
            together = [arm, *(left.pop(other) for other in paired[:1])]
            if len(part) > 1 and len(part) + len(together) > MAX_ARMS:
                yield part
                part = [reference]
            part += together
        yield part


def _control(arm: Arm) -> str:
    return arm.config.compare.control
