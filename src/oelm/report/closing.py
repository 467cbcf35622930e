"""The report's second half: costs, closing tables, reported against reproduced, what is pending."""

from __future__ import annotations

import math
from collections import defaultdict

from oelm.analysis.analyze import Analysis, architecture, task
from oelm.analysis.compare import Arm, Comparison
from oelm.analysis.costs import Cost
from oelm.analysis.goal import REFERENCES
from oelm.analysis.load import FINISHED
from oelm.analysis.statistics import trend
from oelm.analysis.verdict import FAILS, HOLDS
from oelm.experiments.catalogue import experiments
from oelm.report import numbers
from oelm.report.document import Block, Bullets, Fold, Link, Paragraph, Row, Table, Text
from oelm.report.findings import anchor, notes
from oelm.report.words import Words, outcome, place, tone
from oelm.units import duration_text


def where_freezing_holds(analysis: Analysis, w: Words) -> list[Block]:
    """Architecture x task x start: per frozen arm, where the 5 % target holds, fails or is open."""
    cells: dict[tuple[str, str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for c in analysis.comparisons.of("baseline"):
        if c.arm.freezes and not c.arm.probes:
            start = "pretrained" if c.arm.config.model.pretrained else "scratch"
            key = (architecture(c.arm), task(c.arm), start, c.arm.name)
            where = c.target.outcome if c.target.outcome in (HOLDS, FAILS) else "open"
            cells[key][where].append(place(c.arm, w))
    if not cells:
        return [Paragraph(w("none.frozen"))]
    columns = ("architecture", "task", "weights", "arm", "holds", "fails", "open")
    rows = []
    for (kind, what, start, arm), found in sorted(cells.items()):
        listed = [", ".join(dict.fromkeys(found[k])) or "–" for k in (HOLDS, FAILS, "open")]
        rows.append(Row((w(f"architecture.{kind}"), w(f"task.{what}"), w(f"weights.{start}"), arm, *listed)))
    return [Table(tuple(w(f"col.{name}") for name in columns), tuple(rows), words=7)]


def no_loss(analysis: Analysis, w: Words) -> list[Block]:
    """Language models: is anything lost, at which share of Q/K that trains, against what."""
    rows = []
    for goal in analysis.goals:
        arm = goal.arm
        p = analysis.costs[arm.key].parameters
        rows.append(
            Row(
                (
                    place(arm, w),
                    (Link(arm.name, "#" + anchor(arm)),),
                    numbers.share(p.qk_trainable, p.qk_total),
                    w(f"goal.{goal.outcome}"),
                    *(_change(goal.against.get(kind), w) for kind in REFERENCES),
                ),
                tone(goal.verdict),
            )
        )
    if not rows:
        return []
    columns = ("data", "arm", "qk_trained", "goal", *(f"against_{kind}" for kind in REFERENCES))
    compared = [c for goal in analysis.goals for c in goal.against.values() if c.kind in ("start", "plain")]
    table = Table(tuple(w(f"col.{name}") for name in columns), tuple(rows), words=2, verdict=3)
    return [Paragraph(w("about.no_loss")), table, *notes(compared, w)]


def _change(c: Comparison | None, w: Words) -> Text:
    if c is None:
        return "–"
    if c.effect is None:
        return w("outcome.refused")
    bounds = w.tell(numbers.interval(c.effect, c.metric))
    shown = f"{numbers.effect(c.effect, c.metric)} ({bounds}), n = {numbers.seeds(c.effect)}"
    return (Link(shown, "#" + anchor(c.reference)),)


def efficiency(analysis: Analysis, w: Words) -> list[Block]:
    """What each arm trains, stores and takes, beside what it costs in quality."""
    quality = {c.arm.key: c for c in analysis.comparisons.of("baseline")}
    columns = (
        "data",
        "arm",
        "quality",
        "trainable",
        "frozen",
        "frozen_share",
        "qk_trained",
        "checkpoint",
        "memory",
        "step",
        "bound",
    )
    head = tuple(w(f"col.{name}") for name in columns)
    rows = []
    for arm in analysis.arms:
        spent = analysis.costs.get(arm.key)
        if spent is None:
            continue
        p, c = spent.parameters, quality.get(arm.key)
        change: Text = w("role.baseline")
        if c is not None:
            change = w("outcome.refused")
            if c.ratio:
                said = w(f"quality.{c.metric}", change=numbers.change(c.ratio.value))
                change = (Link(said, "#" + anchor(arm)),)
        rows.append(
            Row(
                (
                    place(arm, w),
                    (Link(arm.name, "#" + anchor(arm)),),
                    change,
                    numbers.count(p.trainable),
                    numbers.count(p.frozen),
                    numbers.share(p.frozen, p.total),
                    numbers.share(p.qk_trainable, p.qk_total),
                    numbers.size(spent.checkpoint_bytes),
                    numbers.size(spent.peak_memory_bytes),
                    _step(spent, w),
                    "–" if not spent.bound else f"{numbers.signed(-100 * spent.bound, 1)} %",
                )
            )
        )
    if not rows:
        return [Paragraph(w("none.finished"))]
    files = dict.fromkeys(c.step.source.name for c in analysis.costs.values() if c.step)
    source = [Paragraph(w("about.benchmarks", files=", ".join(files)), small=True)] if files else []
    return [Paragraph(w("about.efficiency")), Table(head, tuple(rows), words=2), *source]


def _step(spent: Cost, w: Words) -> str:
    if spent.step is None:
        return w("step.none")
    low, high = spent.step.interval
    return f"{spent.step.ratio:.3f} ({low:.3f}–{high:.3f})"


def across_datasets(analysis: Analysis, w: Words) -> list[Block]:
    """The gap of each frozen arm ordered by the tokens it was trained on: more data, more loss?"""
    found: dict[tuple[str, str, str, bool], list[tuple[int, Comparison]]] = defaultdict(list)
    for c in analysis.comparisons.of("baseline"):
        if c.arm.freezes and c.ratio is not None and not c.arm.probes:
            key = (c.arm.name, c.metric, c.arm.config.scale, c.arm.config.model.pretrained)
            found[key].append((_training_tokens(c.arm), c))
    head = (w("col.arm"), w("col.data"), w("col.tokens"), w("col.change"), w("col.interval"), "n")
    rows, remarks = [], []
    for (arm, metric, scale, pretrained), entries in found.items():
        if len({c.dataset for _, c in entries}) < 2:
            continue
        start = f", {w('weights.pretrained')}" if pretrained else ""
        name = f"{arm} ({w(f'scale.{scale}')}{start})"
        entries.sort(key=lambda e: e[0])
        for tokens, c in entries:
            assert c.effect is not None
            rows.append(
                Row(
                    (
                        name,
                        c.group,
                        numbers.count(tokens) if tokens else "–",
                        (Link(numbers.effect(c.effect, metric), "#" + anchor(c.arm)),),
                        w.tell(numbers.interval(c.effect, metric)),
                        numbers.seeds(c.effect),
                    ),
                    tone(c.target),
                )
            )
        judged = [(tokens, c) for tokens, c in entries if not c.caveats]
        tau = trend([float(t) for t, _ in judged], [c.effect.value for _, c in judged if c.effect])
        if tau is None:
            remarks.append(w("trend.few", arm=name, n=len(judged)))
        else:
            remarks.append(w("trend.tau", arm=name, tau=f"{tau[0]:.2f}", p=f"{tau[1]:.2f}", n=len(judged)))
    if not rows:
        return [Paragraph(w("none.trend"))]
    return [Table(head, tuple(rows), words=2), Bullets(tuple(remarks))]


def _training_tokens(arm: Arm) -> int:
    """Of the training split; 0 when the manifest does not say."""
    data = arm.finished[0].manifest.get("data")
    tokens = data.get("tokens") if isinstance(data, dict) else None
    value = tokens.get("train") if isinstance(tokens, dict) else None
    return value if isinstance(value, int) else 0


def totals(analysis: Analysis, w: Words) -> list[Block]:
    """Runs, compute time, disk; what is finished and what is pending."""
    states = ", ".join(f"{n} {w.state(s)}" for s, n in sorted(analysis.states.items()))
    rows = [
        Row((w("total.runs"), f"{len(analysis.loaded.runs)} ({states or '–'})")),
        Row((w("total.trials"), str(len(analysis.loaded.trials)))),
        Row((w("total.compute"), duration_text(analysis.compute_seconds))),
        Row((w("total.disk"), numbers.size(analysis.disk_bytes))),
    ]
    return [Table((w("col.total"), ""), tuple(rows), words=1), *_pending(analysis, w)]


def _pending(analysis: Analysis, w: Words) -> list[Block]:
    items: list[Text] = []
    for run in analysis.loaded.runs:
        if run.state != FINISHED:
            state = w.state(run.state)
            progress = f"{run.step} / {run.total_steps}" if run.total_steps else str(run.step)
            scale = w(f"scale.{run.config.scale}")
            reason = f" ({run.reason})" if run.reason else ""
            items.append(
                w(
                    "pending.run",
                    id=run.id,
                    seed=run.seed,
                    scale=scale,
                    state=state,
                    progress=progress,
                    reason=reason,
                )
            )
    items.extend(w.tell(m) for m in analysis.comparisons.waiting)
    blocks: list[Block] = [Bullets(tuple(items))] if items else [Paragraph(w("pending.nothing"))]
    never = analysis.never_started
    if never:
        blocks.append(Fold(w("pending.never", n=len(never)), (Paragraph(", ".join(never)),)))
    return blocks


def reported_and_reproduced(analysis: Analysis, w: Words) -> list[Block]:
    """The study's figures beside ours, each in its own column, at the scale we ran."""
    head = (w("col.id"), w("col.arm"), w("col.reported"), w("col.ours"), w("col.scale"), "n")
    known = experiments()
    rows = []
    for arm in analysis.arms:
        said = known[arm.id].reported if arm.id in known else None
        if said is None or not arm.finished:
            continue
        ours: Text = (Link(numbers.score(arm.mean, arm.metric), "#" + anchor(arm)),)
        rows.append(
            Row(
                (
                    arm.id,
                    arm.name,
                    str(said),
                    ours,
                    w(f"scale.{arm.config.scale}"),
                    str(len(arm.finished)),
                )
            )
        )
    if not rows:
        return [Paragraph(w("none.reported"))]
    note = w("about.reported")
    pairs = _gap_rows(analysis, w)
    blocks: list[Block] = [Paragraph(note), Table(head, tuple(rows), words=2)]
    return [*blocks, *pairs]


def _gap_rows(analysis: Analysis, w: Words) -> list[Block]:
    head = (
        w("col.arm"),
        w("col.against"),
        w("col.reported_change"),
        w("col.ours_change"),
        w("col.interval"),
        w("col.verdict"),
    )
    known = experiments()
    rows = []
    for c in analysis.comparisons.of("baseline"):
        a, b = (known[arm.id].reported if arm.id in known else None for arm in (c.arm, c.reference))
        if a is None or b is None or c.effect is None:
            continue
        theirs = (
            numbers.change(math.log(a.value / b.value))
            if a.metric == "ppl"
            else numbers.points(a.value - b.value)
        )
        rows.append(
            Row(
                (
                    f"{c.arm.id} ({w(f'scale.{c.arm.config.scale}')})",
                    c.reference.id,
                    theirs,
                    (Link(numbers.effect(c.effect, c.metric), "#" + anchor(c.arm)),),
                    w.tell(numbers.interval(c.effect, c.metric)),
                    w.tell(outcome(c.target)),
                ),
                tone(c.target),
            )
        )
    return [Table(head, tuple(rows), words=2)] if rows else []
