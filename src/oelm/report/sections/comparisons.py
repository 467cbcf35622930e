"""The report's tables of comparisons.

Each arm (a method in a comparison) is compared with its baseline and its control, and frozen orthonormal Q/K
rows are compared with frozen Gaussian rows. Further tables show averages over datasets, and which arms reach
the 1 % goal that `goal_table()` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oelm.analysis.analyze import Analysis
from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison
from oelm.analysis.goal import REFERENCES
from oelm.analysis.messages import Message
from oelm.analysis.statistics.intervals import Estimate
from oelm.analysis.verdict import MET, MISSED, UNDECIDED
from oelm.report import numbers
from oelm.report.document import Block, Bullets, Paragraph, Row, Table, Text, plain
from oelm.report.sentences import SCALES, group_title, outcome, place, shown_verdict, tone, why_undecided
from oelm.report.summary import by_group, linked
from oelm.report.translate import Translator

GOALS = {MET: Message("reached"), MISSED: Message("missed"), UNDECIDED: Message("undecided")}


def effect_cells(effect: Estimate, metric: str, arm: Arm, _: Translator) -> tuple[Text, Text, Text]:
    """Return three table cells: the change, its confidence interval and the number of seeds."""
    value = numbers.effect(effect, metric)
    return (
        linked(value if metric == "ppl" else _("{value} points", value=value), arm),
        linked(_(numbers.interval(effect, metric)), arm),
        numbers.seeds(effect),
    )


def _show_tuning(comparisons: Sequence[Comparison]) -> bool:
    return any(c.lr_choice_sd is not None for c in comparisons)


def _tuning(c: Comparison, _: Translator) -> Text:
    """Return the table cell that says how much the choice of the learning rates varies a change."""
    if c.lr_choice_sd is None:
        return "–"
    if c.metric == "ppl":
        return f"±{100 * c.lr_choice_sd:.2f} %"
    return _("{value} points", value=f"±{c.lr_choice_sd:.2f}")


def baseline_tables(analysis: Analysis, _: Translator) -> list[Block]:
    """Return all comparisons with a baseline, as one table for each group of experiments."""
    blocks: list[Block] = []
    for comparisons in by_group(analysis.comparisons.of("baseline")).values():
        blocks.append(_baseline_table(comparisons, _))
        blocks.extend(notes(comparisons, _))
    return blocks


def _baseline_table(comparisons: Sequence[Comparison], _: Translator) -> Table:
    """Return the table of one group; the columns Scenario and Relative are left out if they are empty."""
    accuracy = comparisons[0].metric == "accuracy"
    scenarios = any(c.scenario for c in comparisons)
    head = [_("Arm"), _("Verdict")]
    head += [_("Scenario")] if scenarios else []
    head += [_("Accuracy") if accuracy else _("Perplexity"), _("Change"), _("95 % interval")]
    tuning = _show_tuning(comparisons)
    head += [_("Tuning ±")] if tuning else []
    head += ["n"]
    head += [_("Relative")] if accuracy else []
    rows = []
    # A comparison has only the seeds that both arms share, so show the baseline with most seeds.
    by_seeds = sorted(comparisons, key=lambda c: len(c.reference.finished))
    for reference in {c.reference.key: c.reference for c in by_seeds}.values():
        cells: list[Text] = [linked(reference.name, reference), _("baseline")]
        cells += ["–"] if scenarios else []
        cells += [_mean(reference), *["–"] * (3 if tuning else 2), str(len(reference.finished))]
        cells += ["–"] if accuracy else []
        rows.append(Row(tuple(cells)))
    for c in comparisons:
        cells = [linked(c.arm.name, c.arm), _(outcome(c.target))]
        cells += [_(outcome(c.scenario)) if c.scenario else "–"] if scenarios else []
        if c.effect is None or c.ratio is None:
            cells += ["–"] * (len(head) - len(cells))
        else:
            change, interval, n = effect_cells(c.effect, c.metric, c.arm, _)
            cells += [_mean(c.arm), change, interval, *([_tuning(c, _)] if tuning else []), n]
            cells += [linked(_relative(c.ratio, _), c.arm)] if accuracy else []
        rows.append(Row(tuple(cells), tone(c.target)))
    words = 3 if scenarios else 2
    return Table(tuple(head), tuple(rows), group_title(comparisons[0], _), words, verdict=1)


def _relative(ratio: Estimate, _: Translator) -> str:
    """Return the change of accuracy in per cent of the baseline's accuracy, with its confidence interval.

    The 5 % target is relative, so a change in percentage points does not show whether the target is met.
    """
    return _(
        "{change} ({interval})", change=numbers.change(ratio.value), interval=numbers.interval(ratio, "ppl")
    )


def _mean(arm: Arm) -> Text:
    return linked(numbers.score(arm.mean, arm.metric), arm)


def notes(comparisons: Sequence[Comparison], _: Translator) -> list[Block]:
    """Return the notes below a table: why arms were not compared, then warnings, each with its arms."""
    several = len({c.arm.place for c in comparisons}) > 1
    against: dict[tuple[str, str, str], set[str]] = {}
    for c in comparisons:
        against.setdefault(c.arm.key, set()).add(c.reference.name)
    items: list[Text] = []
    concerned: dict[str, list[str]] = {}
    for c in comparisons:
        name = c.arm.name
        if len(against[c.arm.key]) > 1:
            name = _("{arm} against {reference}", arm=name, reference=c.reference.name)
        if several:
            name = f"{name} · {place(c.arm, _)}"
        items.extend(_("{arms}: {note}", arms=name, note=m) for m in c.refused)
        reason = why_undecided(shown_verdict(c)) if c.effect is not None else None
        for m in (*c.caveats, *c.flags, *([reason] if reason else [])):
            concerned.setdefault(_(m), []).append(name)
    for text, arms in concerned.items():
        items.append(_("{arms}: {note}", arms=tuple(dict.fromkeys(arms)), note=text))
    return [Paragraph(_("Notes on these numbers:"), small=True), Bullets(tuple(items))] if items else []


def control_table(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table of each frozen arm against its control, the same architecture with trained Q/K."""
    comparisons = analysis.comparisons.of("control")
    if not comparisons:
        return []
    about = _(
        "Each method against the same architecture with trained Q/K: architecture gains are not attributed "
        "to freezing. Initialisation and gain are the same too, except for Gaussian rows, whose control has "
        "an orthonormal init."
    )
    return [Paragraph(about), pair_table(comparisons, _), *notes(comparisons, _)]


def orthogonality_table(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table of frozen orthonormal rows against frozen Gaussian rows of the same norm."""
    comparisons = analysis.comparisons.of("orthogonality")
    if not comparisons:
        return []
    about = _(
        "Frozen orthonormal rows against frozen Gaussian rows of the same norm. A comparison with N(0, 0.02) "
        "rows would change orthogonality and the size of the attention logits together (4.9 times larger at "
        "width 512, 20 times at 128), so it could not separate the two."
    )
    return [Paragraph(about), pair_table(comparisons, _), *notes(comparisons, _)]


def _pair_head(_: Translator, tuning: bool = False) -> tuple[str, ...]:
    head = _("Data"), _("Arm"), _("Against"), _("Verdict"), _("Change"), _("95 % interval")
    return (*head, _("Tuning ±"), "n") if tuning else (*head, "n")


def pair_table(comparisons: Sequence[Comparison], _: Translator) -> Table:
    rows, tuning = [], _show_tuning(comparisons)
    for c in comparisons:
        verdict = shown_verdict(c)
        effect: tuple[Text, ...] = ("–", "–", "–")
        if c.effect is not None:
            effect = effect_cells(c.effect, c.metric, c.arm, _)
        names = (place(c.arm, _), linked(c.arm.name, c.arm), linked(c.reference.name, c.reference))
        if tuning:
            effect = (*effect[:2], _tuning(c, _), effect[2])
        rows.append(Row((*names, _(outcome(verdict)), *effect), tone(verdict)))
    return Table(_pair_head(_, tuning), tuple(rows), words=4, verdict=3)


def mean_table(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table of changes averaged over the datasets of a study; [] if there are no averages."""
    rows = []
    for mean in analysis.means:
        c = mean.first
        where = _(
            "{study}, {n} datasets ({scale})",
            study=c.arm.config.study,
            n=len(mean.comparisons),
            scale=SCALES[c.arm.config.scale],
        )
        effect = (plain(cell) for cell in effect_cells(mean.effect, c.metric, c.arm, _))
        cells = (where, c.arm.name, c.reference.name, _(outcome(mean.verdict)), *effect)
        rows.append(Row(cells, tone(mean.verdict)))
    about = _(
        "The same two arms over all datasets of a study: the change is averaged over the datasets for each "
        "seed, and the 95 % confidence interval is over the seeds. It is never narrower than if the seeds of "
        "different datasets were independent. The average describes these datasets only."
    )
    return [Paragraph(about), Table(_pair_head(_), tuple(rows), words=4, verdict=3)] if rows else []


def goal_table(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table of frozen language models and whether they reach the 1 % goal; [] if there are none.

    The goal is a perplexity at most 1 % above the control's; the text of the table has all conditions.
    """
    columns = {
        "control": _("Against control"),
        "bias": _("Against baseline with biases"),
        "init": _("Against trained orthonormal init"),
        "baseline": _("Against baseline"),
        "plain": _("Against plain architecture"),
    }
    rows = []
    for goal in analysis.goals:
        p = analysis.costs[goal.arm.key].parameters
        cells: list[Text] = [place(goal.arm, _), linked(goal.arm.name, goal.arm)]
        cells += [numbers.share(p.qk_trainable, p.qk_total), _(GOALS[goal.outcome])]
        cells += [_goal_cell(goal.against.get(kind), _) for kind in REFERENCES]
        rows.append(Row(tuple(cells), tone(goal.verdict)))
    if not rows:
        return []
    about = _(
        "The goal: a perplexity at most 1 % above the control (same architecture, trained Q/K), at most 1 % "
        "above the trained baseline with the same biases if the arm has biases, and below three references: "
        "the same network without extras, trained from an orthonormal init; the baseline; and the plain "
        "architecture that the baseline itself is compared with. The goal is reached only if every interval "
        "agrees, and missed if one interval contradicts it."
    )
    head = (_("Data"), _("Arm"), _("Q/K trained"), _("Goal"), *(columns[kind] for kind in REFERENCES))
    further = [
        c for goal in analysis.goals for c in goal.against.values() if c.kind in ("bias", "init", "plain")
    ]
    return [Paragraph(about), Table(head, tuple(rows), words=2, verdict=3), *notes(further, _)]


def _goal_cell(c: Comparison | None, _: Translator) -> Text:
    if c is None:
        return "–"
    if c.effect is None:
        return _("not comparable")
    text = _(
        "{change} ({interval}; n = {n})",
        change=numbers.effect(c.effect, c.metric),
        interval=numbers.interval(c.effect, c.metric),
        n=numbers.seeds(c.effect),
    )
    return linked(text, c.reference)


def without_links(table: Table) -> Table:
    """Return the table without links, because the short report has no list of runs to link to."""
    rows = (replace(row, cells=tuple(plain(cell) for cell in row.cells)) for row in table.rows)
    return replace(table, rows=tuple(rows))
