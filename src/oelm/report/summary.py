"""Build the first page of the report: a headline, then one card per dataset with the verdicts in words."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence

from oelm.analysis.analyze import Analysis
from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison
from oelm.analysis.messages import Message
from oelm.analysis.pairs import Kind
from oelm.analysis.verdict import MET, MISSED, REFUSED, WITHHELD
from oelm.report.document import Block, Card, Cards, Inline, Link, Strong, Text
from oelm.report.sentences import conclusion, group_title, outcome, sentences, shown_verdict, tone
from oelm.report.translate import Translator

# The headline, by the kind of the references and by whether there is only one comparison.
COUNTS = {
    ("baseline", True): Message(
        "Frozen arms against their baselines, 1 comparison: {held} cost at most 5 %, {failed} cost more, "
        "{open} undecided."
    ),
    ("baseline", False): Message(
        "Frozen arms against their baselines, {n} comparisons: {held} cost at most 5 %, {failed} cost more, "
        "{open} undecided."
    ),
    ("control", True): Message(
        "Frozen arms against their controls, 1 comparison: {held} cost at most 5 %, {failed} cost more, "
        "{open} undecided."
    ),
    ("control", False): Message(
        "Frozen arms against their controls, {n} comparisons: {held} cost at most 5 %, {failed} cost more, "
        "{open} undecided."
    ),
}
MAIN_METHOD = "oelm-freeze"  # the method of the original study, whose verdict is shown first


def anchor(arm: Arm) -> str:
    """Return the HTML anchor of an arm in the list of runs; it has only letters, digits, "_", "." and "-"."""
    name = "-".join(arm.key)
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    if plain != name:  # other names may become the same text, for example all Chinese ones
        plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"runs-{plain}"


def linked(text: str, arm: Arm) -> Text:
    """Return a text that links to the arm's runs in the list of runs."""
    return (Link(text, "#" + anchor(arm)),)


def by_group(comparisons: Iterable[Comparison]) -> dict[tuple[str, str, str], list[Comparison]]:
    """Return {(study, scale, group): comparisons}, in the order in which they are given."""
    found: dict[tuple[str, str, str], list[Comparison]] = {}
    for c in comparisons:
        found.setdefault((c.arm.config.study, c.arm.config.scale, c.group), []).append(c)
    return found


def frozen_against(kind: Kind, analysis: Analysis) -> list[Comparison]:
    """Return the comparisons of frozen arms with their baselines or controls (`kind`) on real data."""
    return [c for c in analysis.comparisons.of(kind) if c.arm.freezes and not c.arm.probes]


def headline(analysis: Analysis, _: Translator) -> str:
    """Return the verdicts against the baselines in one or two sentences; without baselines, the controls."""
    return count_verdicts(frozen_against("baseline", analysis) or frozen_against("control", analysis), _)


def count_verdicts(frozen: Sequence[Comparison], _: Translator) -> str:
    """Return one or two sentences on how many frozen arms stay within 5 % of their references.

    The references are all baselines, or all controls.
    """
    if not frozen:
        return _("There is no finished comparison of a frozen arm with its baseline yet.")
    held, failed = (sum(c.target.outcome == wanted for c in frozen) for wanted in (MET, MISSED))
    withheld = sum(c.target.outcome in (WITHHELD, REFUSED) for c in frozen)
    judged = len(frozen) - withheld
    parts = []
    if judged:
        counts = {"held": held, "failed": failed, "open": judged - held - failed}
        parts.append(_(COUNTS[frozen[0].kind, judged == 1].template, n=judged, **counts))
    if withheld:
        parts.append(
            _("{n} without a verdict: not a fair comparison, or not on the named dataset.", n=withheld)
        )
    return _.join(parts)


def cards(analysis: Analysis, _: Translator) -> list[Block]:
    """Return one card per group of experiments, with sentences on its `main_comparisons()`."""
    made: list[Card] = []
    for comparisons in by_group(analysis.comparisons.made).values():
        chosen = main_comparisons(comparisons)
        if chosen:
            first = shown_verdict(chosen[0])
            lines = tuple(_line(c, comparisons, _) for c in chosen)
            made.append(Card(group_title(chosen[0], _), lines, tone(first), _(outcome(first))))
    return [Cards(tuple(made))] if made else []


def _line(c: Comparison, group: Sequence[Comparison], _: Translator) -> Text:
    summary = conclusion(c)
    parts = [_(m) for m in sentences(c) if m != summary]
    others = len(_frozen(group)) - len(_main(group))
    if c in best_other(group) and others > 1:
        parts.insert(0, _("Best of {n} other frozen arms on validation:", n=others))
    start: tuple[Inline, ...] = (Strong(_(summary)), " ") if summary is not None else ()
    return (*start, _.join([*parts, ""]), *linked(_("runs"), c.arm))


def main_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the most important comparisons of a group, which the first page of the report describes.

    These are: the original study's method against its baseline, the best other frozen arm against its
    baseline (if it is better than that method), both against their controls, and orthonormal against
    Gaussian rows. In a group without a baseline, the first two are comparisons with controls.
    """
    controls = {c.arm.key: c for c in comparisons if c.kind == "control"}
    chosen = [
        c
        for first in (*_main(comparisons), *best_other(comparisons))
        for c in (first, controls.get(first.arm.key) if first.kind == "baseline" else None)
        if c is not None
    ]
    return chosen + [c for c in comparisons if c.kind == "orthogonality" and c.arm.method.name == MAIN_METHOD]


def _frozen(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of frozen arms with baselines; if there are none, those with controls."""
    frozen = [c for c in comparisons if c.arm.freezes]
    with_baseline = [c for c in frozen if c.kind == "baseline"]
    return with_baseline or [c for c in frozen if c.kind == "control"]


def _main(comparisons: Sequence[Comparison]) -> list[Comparison]:
    frozen = _frozen(comparisons)
    return [c for c in frozen if c.arm.method.name == MAIN_METHOD] or frozen[:1]


def best_other(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparison of the best frozen arm except MAIN_METHOD; [] if MAIN_METHOD is better.

    The best arm is chosen by its validation score, not its test score. The best of several arms has often had
    lucky seeds, so the report says from how many arms it was chosen.
    """
    main = _main(comparisons)
    others = [c for c in _frozen(comparisons) if c.ratio and c not in main]
    best = sorted(others, key=_validation_loss)[:1]
    return [c for c in best if not main or _validation_loss(c) < _validation_loss(main[0])]


def _validation_loss(c: Comparison) -> float:
    """Return how much worse the validation score of an arm is than that of its reference, as a log ratio.

    If a score is unknown, the result is infinity, so that the arm is sorted last.
    """
    own, other = c.arm.validation, c.reference.validation
    if c.ratio is None or not own or not other:
        return math.inf
    return math.log(own / other) if c.metric == "ppl" else math.log(other / own)
