"""The report's first half: verdicts in plain words, then every comparison as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from oelm.analysis.analyze import Analysis
from oelm.analysis.compare import Arm, Comparison
from oelm.analysis.verdict import FAILS, HOLDS, WITHHELD, Verdict
from oelm.report import numbers
from oelm.report.document import (
    Block,
    Bullets,
    Card,
    Cards,
    Code,
    Fold,
    Inline,
    Link,
    Paragraph,
    Row,
    Strong,
    Table,
    Text,
)
from oelm.report.words import Words, badge, outcome, place, plainly, settle, tone, what_it_says

MAIN_METHOD = "oelm-freeze"  # the method the study is about; its verdict stands first
LONG = 80  # characters of a command that a table cell can hold; a longer one is named once and numbered
PathLink = Callable[[Path], str]


def anchor(arm: Arm) -> str:
    """A name for the arm's rows in the list of runs, safe in any document."""
    return "runs-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(arm.key))


def by_group(comparisons: Iterable[Comparison]) -> dict[tuple[str, str, str], list[Comparison]]:
    """(study, scale, group) -> its comparisons, in the order of the runs."""
    found: dict[tuple[str, str, str], list[Comparison]] = {}
    for c in comparisons:
        found.setdefault((c.arm.config.study, c.arm.config.scale, c.group), []).append(c)
    return found


def group_title(comparison: Comparison, w: Words) -> str:
    config = comparison.arm.config
    return w(
        "group.title",
        task=w(f"task.{config.task}"),
        dataset=config.data.dataset,
        group=comparison.group,
        scale=w(f"scale.{config.scale}"),
    )


def lead(analysis: Analysis, w: Words) -> str:
    """One sentence for someone who reads no further."""
    frozen = [c for c in analysis.comparisons.of("baseline") if c.arm.freezes and not c.arm.probes]
    if not frozen:
        return w("lead.nothing")
    held, failed, withheld = (sum(c.target.outcome == o for c in frozen) for o in (HOLDS, FAILS, WITHHELD))
    judged = len(frozen) - withheld
    said = [w("lead", n=judged, held=held, failed=failed, open=judged - held - failed)] if judged else []
    return w("sentence.separator").join([*said, *([w("lead.withheld", n=withheld)] if withheld else [])])


def cards(analysis: Analysis, w: Words) -> Cards:
    """Per dataset: the study's method first, the best other frozen arm, and orthogonality against scale."""
    made: list[Card] = []
    for comparisons in by_group(analysis.comparisons.made).values():
        chosen = headline(comparisons)
        if not chosen:
            continue
        first = chosen[0]
        lines: list[Text] = []
        picked = best_other(comparisons, _main(comparisons))
        frozen = sum(c.kind == "baseline" and c.arm.freezes for c in comparisons)
        rivals = frozen - len(_main(comparisons))
        for c in chosen:
            plain = plainly(c)
            sentences = [w.tell(m) for m in what_it_says(c) if m != plain]
            if c in picked and rivals > 1:
                sentences.insert(0, w("sentence.best", n=rivals))
            words = w("sentence.separator").join(sentences)
            first_words: tuple[Inline, ...] = (Strong(w.tell(plain)), " ") if plain is not None else ()
            lines.append((*first_words, words + " ", Link(w("link.runs"), "#" + anchor(c.arm))))
        made.append(Card(group_title(first, w), tuple(lines), tone(_shown(first)), w.tell(badge(first))))
    return Cards(tuple(made))


def _shown(c: Comparison) -> Verdict:
    """The verdict that its table gives: against a start or another architecture, which is the better."""
    return c.sign if c.kind in ("orthogonality", "start", "plain") else c.target


def headline(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Which comparisons of a group are worth a sentence: the study's method, the best other frozen arm if it
    does better, each with its own-architecture control, and orthogonality against scale."""
    main = _main(comparisons)
    best = best_other(comparisons, main)
    controls = {c.arm.key: c for c in comparisons if c.kind == "control"}
    said = [c for first in (*main, *best) for c in (first, controls.get(first.arm.key)) if c is not None]
    orthogonality = [c for c in comparisons if c.kind == "orthogonality" and c.arm.method.name == MAIN_METHOD]
    return [*said, *orthogonality]


def _main(comparisons: Sequence[Comparison]) -> list[Comparison]:
    frozen = [c for c in comparisons if c.kind == "baseline" and c.arm.freezes]
    return [c for c in frozen if c.arm.method.name == MAIN_METHOD] or frozen[:1]


def best_other(comparisons: Sequence[Comparison], main: Sequence[Comparison]) -> list[Comparison]:
    """The frozen arm that loses least on validation, if it loses less there than the main one; at most one.

    Not by the test figure. The winner is flattered all the same, by seeds that are lucky on both texts: its
    sentence says that it is the best of several.
    """
    others = [c for c in comparisons if c.kind == "baseline" and c.arm.freezes and c.ratio and c not in main]
    best = sorted(others, key=_badness)[:1]
    return [c for c in best if not main or _badness(c) < _badness(main[0])]


def _badness(c: Comparison) -> float:
    """What it loses to its own reference on validation; an arm without it, or refused, comes last."""
    own, other = c.arm.validation, c.reference.validation
    if c.ratio is None or not own or not other:
        return math.inf
    return math.log(own / other) if c.metric == "ppl" else math.log(other / own)


def comparison_blocks(analysis: Analysis, w: Words) -> list[Block]:
    """Every comparison against a baseline, one table per group."""
    blocks: list[Block] = []
    for comparisons in by_group(analysis.comparisons.of("baseline")).values():
        first = comparisons[0]
        blocks.append(_baseline_table(comparisons, group_title(first, w), w))
        blocks.extend(notes(comparisons, w))
    if not blocks:
        blocks.append(Paragraph(w("none.comparisons")))
    return blocks


def _baseline_table(comparisons: Sequence[Comparison], caption: str, w: Words) -> Table:
    """Columns that say nothing for this metric are left out."""
    metric = comparisons[0].metric
    columns = ["arm", "verdict", "scenario", metric, "change", "interval", "ratio", "seeds"]
    if metric == "ppl":
        columns.remove("ratio")  # the change is the ratio
    if not any(c.scenario for c in comparisons):
        columns.remove("scenario")
    rows = []
    for reference in {c.reference.key: c.reference for c in comparisons}.values():
        cells: dict[str, Text] = {
            "arm": _linked(reference.name, reference),
            "verdict": w("role.baseline"),
            metric: _mean(reference),
            "seeds": str(len(reference.finished)),
        }
        rows.append(Row(tuple(cells.get(name, "–") for name in columns)))
    for c in comparisons:
        cells = _cells(c, w)
        rows.append(Row(tuple(cells.get(name, "–") for name in columns), tone(c.target)))
    words = columns.index(metric)
    return Table(tuple(w(f"col.{name}") for name in columns), tuple(rows), caption, words, verdict=1)


def _cells(c: Comparison, w: Words) -> dict[str, Text]:
    name = _linked(c.arm.name, c.arm)
    if c.effect is None or c.ratio is None:
        return {"arm": name, "verdict": w("outcome.refused")}
    return {
        "arm": name,
        "verdict": w.tell(outcome(c.target)),
        "scenario": w.tell(outcome(c.scenario)) if c.scenario else "–",
        c.metric: _mean(c.arm),
        "change": _linked(numbers.effect(c.effect, c.metric), c.arm),
        "interval": _linked(w.tell(numbers.interval(c.effect, c.metric)), c.arm),
        "ratio": _linked(numbers.change(c.ratio.value), c.arm),
        "seeds": numbers.seeds(c.effect),
    }


def _linked(text: str, arm: Arm) -> Text:
    return (Link(text, "#" + anchor(arm)),)


def _mean(arm: Arm) -> Text:
    return _linked(numbers.score(arm.mean, arm.metric), arm)


def notes(comparisons: Sequence[Comparison], w: Words) -> list[Block]:
    """What a reader of the table must know: refusals first, then flags with the arms they concern."""
    several = len({c.arm.place for c in comparisons}) > 1
    items: list[Text] = []

    def name(c: Comparison) -> str:
        return f"{c.arm.name}, {place(c.arm, w)}" if several else c.arm.name

    for c in comparisons:
        for m in c.refused:
            items.append((f"{name(c)}: ", w.tell(m)))
    concerned: dict[str, list[str]] = {}
    for c in comparisons:
        for m in (*c.caveats, *c.flags):
            concerned.setdefault(w.tell(m), []).append(name(c))
        more = settle(_shown(c))
        if more is not None and c.effect is not None:
            concerned.setdefault(w.tell(more), []).append(name(c))
    for text, arms in concerned.items():
        items.append((f"{('; ' if several else ', ').join(dict.fromkeys(arms))}: ", text))
    return [Paragraph(w("notes"), small=True), Bullets(tuple(items))] if items else []


def other_comparisons(analysis: Analysis, kind: str, w: Words) -> list[Block]:
    """Own-architecture controls, or orthogonality against scale: one table over all datasets."""
    comparisons = [c for c in analysis.comparisons.made if c.kind == kind]
    if not comparisons:
        return [Paragraph(w(f"none.{kind}"))]
    head = (
        w("col.data"),
        w("col.arm"),
        w("col.against"),
        w("col.verdict"),
        w("col.change"),
        w("col.interval"),
        "n",
    )
    rows = []
    for c in comparisons:
        verdict = _shown(c)
        where, against = place(c.arm, w), _linked(c.reference.name, c.reference)
        names: tuple[Text, ...] = (where, _linked(c.arm.name, c.arm), against)
        if c.effect is None:
            rows.append(Row((*names, w("outcome.refused"), "", "", ""), "open"))
            continue
        rows.append(
            Row(
                (
                    *names,
                    w.tell(outcome(verdict)),
                    _linked(numbers.effect(c.effect, c.metric), c.arm),
                    _linked(w.tell(numbers.interval(c.effect, c.metric)), c.arm),
                    numbers.seeds(c.effect),
                ),
                tone(verdict),
            )
        )
    return [
        Paragraph(w(f"about.{kind}")),
        Table(head, tuple(rows), words=4, verdict=3),
        *notes(comparisons, w),
    ]


def mean_blocks(analysis: Analysis, w: Words) -> list[Block]:
    """The same two arms over all datasets of a study; nothing where no study has several."""
    rows = []
    for mean in analysis.means:
        c, effect = mean.first, mean.effect
        scale = w(f"scale.{c.arm.config.scale}")
        rows.append(
            Row(
                (
                    w("mean.place", study=c.arm.config.study, n=len(mean.comparisons), scale=scale),
                    c.arm.name,
                    c.reference.name,
                    w.tell(outcome(mean.verdict)),
                    numbers.effect(effect, c.metric),
                    w.tell(numbers.interval(effect, c.metric)),
                    numbers.seeds(effect),
                ),
                tone(mean.verdict),
            )
        )
    columns = ("data", "arm", "against", "verdict", "change", "interval")
    head = (*(w(f"col.{name}") for name in columns), "n")
    return [Paragraph(w("about.mean")), Table(head, tuple(rows), words=4, verdict=3)] if rows else []


def run_blocks(analysis: Analysis, link: PathLink, w: Words) -> list[Block]:
    """Every run with its figure, folder and command: where each number above leads."""
    blocks: list[Block] = [Paragraph(w("about.runs"))]
    head = (w("col.seed"), w("col.state"), w("col.folder"), w("col.command"), w("col.test"))
    for study in dict.fromkeys(a.config.study for a in analysis.arms):
        arms = [a for a in analysis.arms if a.config.study == study]
        every = dict.fromkeys(run.command for arm in arms for run in arm.runs)
        long = {c: w("command.number", n=i + 1) for i, c in enumerate(c for c in every if len(c) > LONG)}
        listed: list[Text] = [(f"{name}: ", Code(command)) for command, name in long.items()]
        listed += [w("data.origin", **facts) for facts in _origins(arms)]
        inner: list[Block] = [Bullets(tuple(listed))] if listed else []
        for arm in arms:
            rows = []
            for i, run in enumerate(arm.runs):
                value = run.result.test if run.result else None
                folder: tuple[Inline, ...] = (Link(str(run.path.name), link(run.path)),)
                shown = numbers.score(value, run.result.metric) if run.result and value is not None else "–"
                rows.append(
                    Row(
                        (
                            str(run.seed),
                            w.state(run.state),
                            folder,
                            long.get(run.command, (Code(run.command),)),
                            shown,
                        ),
                        anchor=anchor(arm) if i == 0 else "",
                    )
                )
            caption = f"{arm.id} · {arm.name} · {w(f'scale.{arm.config.scale}')}"
            inner.append(Table(head, tuple(rows), caption, words=4))
        runs = sum(len(a.runs) for a in arms)
        blocks.append(Fold(w("fold.runs", study=study, n=runs), tuple(inner)))
    return blocks


def _origins(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """Where the text of these arms came from and how much of it there was, by their manifests."""
    found = []
    for arm in arms:
        data = arm.runs[0].manifest.get("data", {})
        rows, origin = data.get("rows", {}).get("train"), str(data.get("origin", ""))
        if rows:
            found.append({"dataset": arm.config.data.dataset, "origin": origin, "rows": f"{rows:,}"})
    return [facts for i, facts in enumerate(found) if facts not in found[:i]]
