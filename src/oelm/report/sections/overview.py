"""The report's tables over all arms (the methods that were compared).

They show where freezing works, what each arm costs, the trend over datasets, and the results that the
original study reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean

from oelm.analysis.analyze import Analysis
from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison
from oelm.analysis.costs import Cost
from oelm.analysis.messages import Message
from oelm.analysis.statistics.intervals import trend
from oelm.analysis.verdict import MET, MISSED
from oelm.config.run_config import ModelConfig
from oelm.experiments.catalogue import experiments
from oelm.experiments.experiment import Reported
from oelm.report import numbers
from oelm.report.document import Block, Bullets, Paragraph, Row, Table, Text
from oelm.report.sections.comparisons import effect_cells
from oelm.report.sentences import SCALES, TASKS, outcome, place, tone
from oelm.report.summary import frozen_against, linked
from oelm.report.translate import Translator

ARCHITECTURES = {
    "encoder": Message("Encoder (bidirectional)"),
    "decoder": Message("Decoder (causal)"),
    "encoder-decoder": Message("Encoder-decoder"),
    "other": Message("Other"),
}
WEIGHTS = {True: Message("pretrained"), False: Message("from scratch")}


def where_freezing_works(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table of datasets on which each frozen arm meets or misses the 5 % target, or is undecided.

    It has one row for each combination of architecture, task, initial weights and arm.
    """
    cells: dict[tuple[str, str, bool, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for c in frozen_against("baseline", analysis):
        key = (c.arm.architecture, c.arm.task, c.arm.config.model.pretrained, c.arm.name)
        decided = c.target.outcome in (MET, MISSED)
        cells[key][c.target.outcome if decided else "open"].append(place(c.arm, _))
    if not cells:
        return []
    head: tuple[str, ...] = (_("Architecture"), _("Task"), _("Weights"), _("Arm"))
    head += (_("Within 5 %"), _("Misses 5 %"), _("Not decided"))
    rows = []
    for (kind, what, pretrained, arm), found in sorted(cells.items()):
        listed = [", ".join(dict.fromkeys(found[k])) or "–" for k in (MET, MISSED, "open")]
        rows.append(Row((_(ARCHITECTURES[kind]), _(TASKS[what]), _(WEIGHTS[pretrained]), arm, *listed)))
    return [Table(head, tuple(rows), words=7)]


def cost_table(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table of each arm's quality, parameters, checkpoint size, memory and step time."""
    quality = {c.arm.key: c for c in analysis.comparisons.of("baseline")}
    head: tuple[str, ...] = (_("Data"), _("Arm"), _("Quality"), _("Trained"), _("Frozen"))
    head += (
        _("Frozen share"),
        _("Q/K trained"),
        _("Checkpoint"),
        _("Peak memory"),
        _("Step time ratio"),
        _("FLOP bound"),
    )
    rows = []
    for arm in analysis.arms:
        cost = analysis.costs.get(arm.key)
        if cost is None:
            continue
        p = cost.parameters
        rows.append(
            Row(
                (
                    place(arm, _),
                    linked(arm.name, arm),
                    _quality(arm, quality.get(arm.key), _),
                    f"{p.trainable:,}",
                    f"{p.frozen:,}",
                    numbers.share(p.frozen, p.total),
                    numbers.share(p.qk_trainable, p.qk_total),
                    numbers.size(cost.checkpoint_bytes),
                    numbers.size(cost.peak_memory_bytes),
                    _step_time(cost, _),
                    f"{numbers.signed(-100 * cost.bound, 1)} %" if cost.bound else "–",
                )
            )
        )
    if not rows:
        return []
    about = _(
        "Quality is the change of perplexity (lower is better) or accuracy (higher is better) against the "
        "baseline. Step times come only from benchmarks; the FLOP bound is the largest saving that "
        "the FLOP count allows."
    )
    files = ", ".join(dict.fromkeys(c.step.source.name for c in analysis.costs.values() if c.step))
    source = [Paragraph(_("Step times from {files}.", files=files), small=True)] if files else []
    return [Paragraph(about), Table(head, tuple(rows), words=2), *source]


def _quality(arm: Arm, c: Comparison | None, _: Translator) -> Text:
    if c is None:
        waits = arm.config.compare.baseline not in ("", arm.id)
        return _("waiting for the baseline") if waits else _("baseline")
    if c.ratio is None:
        return _("not comparable")
    values = {
        "change": numbers.change(c.ratio.value),
        "interval": numbers.interval(c.ratio, "ppl"),  # "ppl" because the ratio is shown in per cent
        "n": numbers.seeds(c.ratio),
    }
    if c.metric == "ppl":
        return linked(_("perplexity {change} ({interval}; n = {n})", **values), arm)
    return linked(_("accuracy {change} ({interval}; n = {n})", **values), arm)


def _step_time(cost: Cost, _: Translator) -> str:
    if cost.step is None:
        return _("not benchmarked")
    low, high = cost.step.interval
    return f"{cost.step.ratio:.3f} ({low:.3f}–{high:.3f})"


def trend_table(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table of the change of each frozen arm on several datasets, with a test for a trend.

    The datasets are ordered by their number of training tokens.
    """
    found: dict[tuple[str, str, str, str, ModelConfig], list[tuple[int, Comparison]]] = defaultdict(list)
    for c in frozen_against("baseline", analysis):
        if c.effect is not None:
            config = c.arm.config
            key = (config.study, c.arm.name, c.metric, config.scale, config.model)
            found[key].append((_training_tokens(c.arm), c))
    rows: list[Row] = []
    remarks: list[Text] = []
    for (_study, arm, metric, scale, model), entries in found.items():
        if len({c.dataset for tokens, c in entries}) < 2:
            continue
        name = _("{name} ({scale})", name=arm, scale=SCALES[scale])
        if model.pretrained:
            name = _("{name} ({scale}, pretrained)", name=arm, scale=SCALES[scale])
        entries.sort(key=lambda entry: entry[0])
        for tokens, c in entries:
            assert c.effect is not None
            cells = (
                name,
                c.group,
                f"{tokens:,}" if tokens else "–",
                *effect_cells(c.effect, metric, c.arm, _),
            )
            rows.append(Row(cells, tone(c.target)))
        judged: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for tokens, c in entries:
            if c.effect and not c.caveats:
                judged[c.dataset].append((tokens, c.effect.value))
        # A dataset that was compared twice, as with different budgets, is one point of the trend.
        points = [(fmean(x for x, y in same), fmean(y for x, y in same)) for same in judged.values()]
        remarks.append(_trend(name, points, _))
    if not rows:
        return []
    head = (_("Arm"), _("Data"), _("Training tokens"), _("Change"), _("95 % interval"), "n")
    return [Table(head, tuple(rows), words=2), Bullets(tuple(remarks))]


def _trend(arm: str, points: list[tuple[float, float]], _: Translator) -> str:
    tau = trend([x for x, y in points], [y for x, y in points])
    if tau is None:
        return _(
            "{arm}: {n} datasets are too few to test for a trend (at least five are needed).",
            arm=arm,
            n=len(points),
        )
    return _(
        "{arm}: Kendall's tau of the gap with the training tokens is {tau} (p = {p}, {n} datasets).",
        arm=arm,
        tau=f"{tau[0]:.2f}",
        p=f"{tau[1]:.2f}",
        n=len(points),
    )


def _training_tokens(arm: Arm) -> int:
    """Return the number of tokens in the training split; 0 if the run's manifest does not record it."""
    return arm.finished[0].manifest.data.tokens.get("train", 0)


def reported_tables(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the tables with the results of the original study and of our runs in separate columns."""
    rows = []
    for arm in analysis.arms:
        theirs = _reported(arm)
        if theirs is not None and arm.finished:
            ours = linked(numbers.score(arm.mean, arm.metric), arm)
            scale, n = _(SCALES[arm.config.scale]), str(len(arm.finished))
            rows.append(Row((arm.id, arm.name, str(theirs), ours, scale, n)))
    if not rows:
        return []
    about = _(
        "Left: the figures printed by the original study. Right: our runs at the scale named. They are never "
        "averaged or mixed; at a different scale, only the direction of a gap can be compared."
    )
    head = (_("ID"), _("Arm"), _("Reported by the original study"), _("Ours"), _("Scale"), "n")
    return [Paragraph(about), Table(head, tuple(rows), words=2), *_reported_changes(analysis, _)]


def _reported(arm: Arm) -> Reported | None:
    known = experiments().get(arm.id)
    return known.reported if known else None


def _reported_changes(analysis: Analysis, _: Translator) -> list[Block]:
    rows = []
    for c in analysis.comparisons.of("baseline"):
        a, b = _reported(c.arm), _reported(c.reference)
        if a is None or b is None or c.effect is None:
            continue
        ratio = math.log(a.value / b.value)
        theirs = numbers.change(ratio) if a.metric == "ppl" else numbers.points(a.value - b.value)
        name = _("{name} ({scale})", name=c.arm.id, scale=SCALES[c.arm.config.scale])
        ours = effect_cells(c.effect, c.metric, c.arm, _)
        rows.append(Row((name, c.reference.id, _(outcome(c.target)), theirs, *ours), tone(c.target)))
    head: tuple[str, ...] = (_("Arm"), _("Against"), _("Verdict"), _("Change, reported"))
    head += (_("Change, ours"), _("95 % interval"), "n")
    return [Table(head, tuple(rows), words=3, verdict=2)] if rows else []
